"""LoRA by PEFT: the model's own weights are frozen, and small matrices next to its linear layers are trained.

Only files of this room import peft.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lowmem_ft.foundation.errors import UserError, raise_problems
from lowmem_ft.foundation.handle import Handle
from lowmem_ft.techniques.adapters.config import AdapterConfig
from lowmem_ft.techniques.adapters.modules_to_save import is_tied, modules_to_save
from lowmem_ft.techniques.adapters.peft_layers import adapted_layers, add_layers
from lowmem_ft.techniques.adapters.target_modules import (
    ALL_LINEAR,
    outside_text,
    short_name,
    target_modules,
    with_another_forward,
)
from lowmem_ft.techniques.adapters.target_parameters import target_parameters
from lowmem_ft.techniques.adapters.trained_adapter import Lora
from lowmem_ft.techniques.adapters.trained_rows import check_rows, peft_setting, train_rows
from lowmem_ft.techniques.adapters.whole_model import WholeModel

__all__ = ["enable_lora"]

logger = logging.getLogger(__name__)


def check_adapter(config: AdapterConfig) -> None:
    """Reject early what :func:`enable_lora` could not do.

    Raises:
        UserError: if a value is out of range.
        MissingPackageError: if peft is needed and not installed.
    """
    raise_problems(config.problems())
    config.require_packages()


def check_names(model: PreTrainedModel, config: AdapterConfig, whole: WholeModel | None) -> None:
    """Reject names that a model has no layer, parameter or module for; its weights may be on the meta device.

    Raises:
        UserError: if there are any.
    """
    target_parameters(model, config)
    if config.target_modules != (ALL_LINEAR,):
        target_modules(model, config, whole)
    modules_to_save(model, config, whole)


def enable_lora(
    model: PreTrainedModel,
    config: AdapterConfig,
    *,
    base_name: str | None = None,
    base_revision: str | None = None,
    whole: WholeModel | None = None,
    new_rows: range = range(0),
) -> Lora:
    """Add low-rank adapters to linear layers and fused experts, in place, and freeze all else.

    Frees: gradients and optimizer state of the model's own weights; the weights may then be quantised, too.
    Costs: other mathematics (each matrix moves by a matrix of rank r); two more small products per layer.
    Equals: PEFT's LoRA, product by product; the model's own outputs until the first step, as one of the two matrices is
    zero (DoRA's up to the rounding of a length).
    Limits: towers for images and sound, and what joins them to the text, are frozen, and so is a subclass of a linear
    layer with a forward of its own: routers, grouped projections; layers whose weight alone a fused kernel reads
    (``out_proj`` of Mamba) are left out. Experts that are one tensor get adapters where ``adapter.target_parameters``
    names them, or by ``all-linear`` if PEFT knows the family and they are not packed; routers are frozen unless they
    are named. Modules of ``adapter.modules_to_save`` are trained in place, in their own type, where PEFT trains a copy
    of each: their gradients and state are those of full fine-tuning. With ``adapter.train_new_tokens`` the rows of new
    tokens are trained in place, without PEFT's copy of the table. PEFT's own forward computes the whole sum of a
    layer's experts and adapter, and none of packed ones: :func:`enable_fused_adapters` does both. The adapters are
    float32, the frozen weights keep their type, norms and embeddings too. PEFT copies a layer's input to float32 for
    its adapter; under autocast that copy is left out, since autocast would take it back.
    Source: LoRA, 2021 (arXiv:2106.09685); QLoRA, 2023 (arXiv:2305.14314); rsLoRA, 2023 (arXiv:2312.03732); DoRA, 2024
    (arXiv:2402.09353).

    Args:
        model: a causal LM from transformers, its linear layers plain or bitsandbytes'.
        config: rank, scale, dropout, layers and kind.
        base_name: the base that the saved adapter names, a hub id or folder; None: the model's own name.
        base_revision: the hub revision of that base.
        whole: the model whose language model this is, and for which the adapters are saved; None: it is a whole one.
        new_rows: for ``config.train_new_tokens``, the rows of the new tokens in the embedding and head.

    Returns:
        A handle that saves and loads the adapters; ``remove()`` gives the plain model back, and ``requires_grad``.

    Raises:
        UserError: if a value is out of range, a name in ``adapter.target_modules`` does not belong to a linear layer or
            one in ``adapter.target_parameters`` to a parameter, or the kind of adapter does not go with a layer; the
            model is then as it was.
        MissingPackageError: if peft is not installed.
    """
    check_adapter(config)
    _refuse_dora_of_8bit(model, config)
    parameters = target_parameters(model, config)
    targets = target_modules(model, config, whole)
    saved_modules = modules_to_save(model, config, whole)
    if config.train_new_tokens:
        check_rows(model, new_rows, list(saved_modules.values()), of_several_parts=whole is not None)
    undo = [partial(_set_requires_grad, model, _requires_grad(model)), *_restore_config(model)]
    lora_config = _pefts_config(model, config, targets, parameters)
    try:
        peft_model = add_layers(model, lora_config)
        undo.append(peft_model.unload)
        _refuse_trained_twice(adapted_layers(model), saved_modules)
    except UserError:
        Handle(*undo).remove()
        raise
    lora_config.base_model_name_or_path = base_name or lora_config.base_model_name_or_path
    lora_config.revision = base_revision
    layers = adapted_layers(model)
    if whole is not None and targets == ALL_LINEAR:
        # PEFT has made it a list of every layer's name; in the files it is a short pattern.
        lora_config.target_modules = sorted({short_name(name) for name in layers})
    if saved_modules:
        lora_config.modules_to_save = list(config.modules_to_save)
        lora_config.ensure_weight_tying = is_tied(model)
    for module in saved_modules.values():
        module.requires_grad_(True)
    if config.train_new_tokens:
        undo += train_rows(model, new_rows)
        lora_config.trainable_token_indices = peft_setting(model)
    _log(model, config, layers, saved_modules)
    return Lora(model, peft_model, *undo, whole=whole, saved_modules=saved_modules.values())


def _pefts_config(
    model: PreTrainedModel, config: AdapterConfig, targets: str | list[str], parameters: list[str]
) -> Any:
    """Return PEFT's config of the adapter."""
    from peft import LoraConfig

    return LoraConfig(
        r=config.r,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type]  # PEFT divides it; a whole number is only its habit
        lora_dropout=config.lora_dropout,
        target_modules=targets,
        target_parameters=parameters or None,
        exclude_modules=[*with_another_forward(model), *outside_text(model)] or None,
        use_dora=config.use_dora,
        use_rslora=config.use_rslora,
        task_type="CAUSAL_LM",
    )


def _refuse_trained_twice(layers: Iterable[str], saved_modules: Iterable[str]) -> None:
    """Reject an adapter inside a module that is trained whole."""
    both = [name for name in layers if any(f"{name}.".startswith(f"{one}.") for one in saved_modules)]
    if both:
        raise UserError(
            f"adapter.modules_to_save trains a module whole, and {min(both)} has an adapter, too. Leave it out of "
            "adapter.modules_to_save or adapter.target_modules."
        )


def _refuse_dora_of_8bit(model: PreTrainedModel, config: AdapterConfig) -> None:
    """Reject DoRA where PEFT (0.21.2) would read a weight without its scales: in FP8, and on a CPU in int8."""
    if not config.use_dora:
        return
    if any(one.dtype == torch.float8_e4m3fn for one in model.parameters()):
        raise UserError(
            "adapter.use_dora=true needs the lengths of a layer's weights, which PEFT takes without the scales of a "
            f"base in FP8, got a {type(model).__name__} in FP8. Set adapter.use_dora=false, or "
            "model.quantization=dequantize."
        )
    if getattr(model, "is_loaded_in_8bit", False) and model.device.type == "cpu":
        raise UserError(
            "adapter.use_dora=true with model.quantization=int8 needs a GPU, got device cpu. Set "
            "model.quantization=nf4 or adapter.use_dora=false."
        )


def _requires_grad(model: nn.Module) -> dict[str, bool]:
    """Return by name which weights are trained: FSDP2 replaces the parameters, and could free none that is kept."""
    return {
        name: parameter.requires_grad
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point()
    }


def _set_requires_grad(model: nn.Module, by_name: Mapping[str, bool]) -> None:
    for name, parameter in model.named_parameters():
        if name in by_name:
            parameter.requires_grad_(by_name[name])


def _restore_config(model: PreTrainedModel) -> list[Callable[[], object]]:
    """Restore ``pretraining_tp`` of a config that has it, which PEFT sets to 1."""
    if not hasattr(model.config, "pretraining_tp"):
        return []
    return [partial(setattr, model.config, "pretraining_tp", model.config.pretraining_tp)]


def _log(
    model: nn.Module, config: AdapterConfig, layers: Mapping[str, Any], saved_modules: Mapping[str, nn.Module]
) -> None:
    kinds = [kind for kind, chosen in (("DoRA", config.use_dora), ("rsLoRA", config.use_rslora)) if chosen]
    of_experts = [layer for layer in layers.values() if hasattr(layer, "parameter_name")]
    names = sorted({getattr(layer, "parameter_name", short_name(name)) for name, layer in layers.items()})
    trained = sum(parameter.numel() for name, parameter in model.named_parameters() if "lora_" in name)
    if saved_modules:
        weights = {weight for module in saved_modules.values() for weight in module.parameters()}
        logger.info(
            "Adapter: %s trained and saved whole, %s parameters in their own type%s.",
            f"{', '.join(sorted(saved_modules))} {'is' if len(saved_modules) == 1 else 'are'}",
            f"{sum(weight.numel() for weight in weights):,}",
            ", the head's weight with the embedding's" if is_tied(model) else "",
        )
    logger.info(
        "Adapter: %s of rank %d on %d linear layers%s (%s), %s parameters in float32.",
        " and ".join(kinds) or "LoRA",
        config.r,
        len(layers) - len(of_experts),
        f" and {len(of_experts)} tensors of experts" if of_experts else "",
        ", ".join(names),
        f"{trained:,}",
    )
