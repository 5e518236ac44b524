"""LoRA by PEFT: the model's own weights are frozen, and small matrices next to its linear layers are trained.

Only files of this room import peft.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from lowmem_ft.foundation.errors import CheckpointError, UserError, raise_problems
from lowmem_ft.foundation.handle import Handle
from lowmem_ft.techniques.adapters.adapter_folder import WEIGHTS_FILE
from lowmem_ft.techniques.adapters.config import AdapterConfig
from lowmem_ft.techniques.adapters.modules_to_save import add_to_file, is_tied, modules_to_save
from lowmem_ft.techniques.adapters.target_modules import (
    ALL_LINEAR,
    short_name,
    target_modules,
    with_another_forward,
)
from lowmem_ft.techniques.adapters.target_parameters import target_parameters
from lowmem_ft.techniques.adapters.trained_rows import (
    check_rows,
    peft_setting,
    train_rows,
    trained_parameters,
)
from lowmem_ft.techniques.adapters.whole_model import (
    WholeModel,
    name_for_whole,
    named_for_language_model,
)
from lowmem_ft.techniques.modules.patching import set_attribute
from lowmem_ft.techniques.technique import Technique
from lowmem_ft.tensors.local_shards import is_partitioned, set_whole, whole_shape, whole_tensor
from lowmem_ft.tensors.logical_size import logical_shape
from lowmem_ft.upstream.grouped_experts import weights_of
from lowmem_ft.upstream.patches import existing

__all__ = ["enable_lora"]

logger = logging.getLogger(__name__)

_NAME = "default"
"""PEFT's name for the only adapter of a model; files do not contain it."""


class Lora(Technique):
    """The adapters of a model, and their files in PEFT's format.

    The model itself is what gets called, so that everything that works on its layers finds them where they were;
    PEFT's wrapper serves the files alone, and any caller that wants it.

    Attributes:
        model: the model with adapters.
        peft_model: PEFT's wrapper around it.
    """

    is_trained = True

    def __init__(
        self,
        model: Any,
        peft_model: Any,
        *undo: Callable[[], object],
        whole: WholeModel | None = None,
        own_weights: Iterable[nn.Parameter] = (),
    ) -> None:
        super().__init__(*undo)
        self.model = model
        self.peft_model = peft_model
        self._whole = whole
        self._own_weights = set(own_weights)

    def parameters(self) -> dict[str, nn.Parameter]:
        """The adapters' parameters and the trained ones of the model itself, by their names: no others are trained."""
        return {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if "lora_" in name or parameter in self._own_weights
        }

    def save(self, folder: Path, *, writes: bool = True) -> bool:
        """Write ``adapter_model.safetensors`` and ``adapter_config.json``, and check them by reading them back.

        Raises:
            CheckpointError: if what is in the folder then is not this adapter, bit for bit.
        """
        named = self._gathered()
        if not writes:
            return True
        # PEFT makes a set of the layers, whose order is another in every process.
        for config in self.peft_model.peft_config.values():
            if isinstance(config.target_modules, set):
                config.target_modules = sorted(config.target_modules)
        # The state is passed explicitly: without it PEFT would collect that of the whole base first.
        self.peft_model.save_pretrained(folder, state_dict=named, save_embedding_layers=False)
        add_to_file(folder, {name: tensor for name, tensor in named.items() if not _is_of_adapter(name)})
        (folder / "README.md").unlink()  # PEFT's model card; the run writes its own
        if self._whole is not None:
            name_for_whole(folder, self._whole)
        state = self._as_in_files(named)
        saved = self._read(folder)
        _compare(state, saved, f"The adapter saved in {folder} is not the one in memory")
        return True

    def load(self, folder: Path) -> None:
        """Load the values of a saved adapter, bit for bit; if the adapter is sharded, this rank's rows.

        Raises:
            CheckpointError: if the adapter does not have these layers and this rank.
        """
        saved, live = self._read(folder), self._as_in_files(self._named_for_peft(self.parameters()))
        problem = f"The adapter in {folder} does not fit this run's"
        _compare(live, saved, problem, by_value=False)
        for name, parameter in live.items():
            set_whole(parameter, saved[name])
        _compare(self._as_in_files(self._gathered()), saved, problem)

    def _read(self, folder: Path) -> dict[str, Tensor]:
        tensors = read_weights(folder)
        return tensors if self._whole is None else named_for_language_model(tensors, self._whole)

    def _gathered(self) -> dict[str, Tensor]:
        """Gather the whole adapter; if several processes hold parts of it, each of them must call this."""
        whole = {name: whole_tensor(parameter).detach() for name, parameter in self.parameters().items()}
        return self._named_for_peft(whole)

    def _as_in_files(self, named: dict[str, Any]) -> dict[str, Tensor]:
        """Key tensors by their names in files, which omit the adapter's name within the model."""
        from peft import get_peft_model_state_dict

        of_model = {name: tensor for name, tensor in named.items() if not _is_of_adapter(name)}
        of_adapter = {name: tensor for name, tensor in named.items() if name not in of_model}
        return of_model | get_peft_model_state_dict(
            self.peft_model, state_dict=of_adapter, save_embedding_layers=False
        )

    def _named_for_peft(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Key tensors by PEFT's names; one that several modules share has all of its names, as in PEFT's files."""
        every_name = dict(self.model.named_parameters(remove_duplicate=False))
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return {
            f"base_model.model.{name}": tensors[names[parameter]]
            for name, parameter in every_name.items()
            if names[parameter] in tensors
        }


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
    Limits: a subclass of a linear layer with a forward of its own is frozen: routers, grouped projections; layers whose
    weight alone a fused kernel reads (``out_proj`` of Mamba) are left out. Experts that are one tensor get adapters
    where ``adapter.target_parameters`` names them, or by ``all-linear`` if PEFT knows the family and they are not
    packed; routers are frozen unless they are named. Modules of ``adapter.modules_to_save`` are trained in place, in
    their own type, where PEFT trains a copy of each: their gradients and state are those of full fine-tuning. With
    ``adapter.train_new_tokens`` the rows of new tokens are trained in place, without PEFT's copy of the table. PEFT's
    own forward computes the whole sum of a layer's experts and adapter, and none of packed ones:
    :func:`enable_fused_adapters` does both. The adapters are float32, the frozen weights keep their type, norms and
    embeddings too. PEFT copies a layer's input to float32 for its adapter; under autocast that copy is left out, since
    autocast would take it back.
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
    from peft import LoraConfig, get_peft_model

    _refuse_dora_of_8bit(model, config)
    parameters = target_parameters(model, config)
    targets = target_modules(model, config, whole)
    saved_modules = modules_to_save(model, config, whole)
    if config.train_new_tokens:
        check_rows(model, new_rows, list(saved_modules.values()), of_several_parts=whole is not None)
    undo = [*_restore_requires_grad(model), *_restore_config(model)]
    lora_config = LoraConfig(
        r=config.r,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type]  # PEFT divides it; a whole number is only its habit
        lora_dropout=config.lora_dropout,
        target_modules=targets,
        target_parameters=parameters or None,
        exclude_modules=with_another_forward(model) or None,
        use_dora=config.use_dora,
        use_rslora=config.use_rslora,
        task_type="CAUSAL_LM",
    )
    try:
        with without_pefts_warnings(), _made_in_float32(), _experts_as_float32(model):
            peft_model: Any = get_peft_model(model, lora_config)
    except ValueError as error:
        Handle(*undo, partial(_take_layers_off, model)).remove()
        raise UserError(
            f"PEFT does not support such an adapter for a layer of {type(model).__name__}: {error} Set "
            "adapter.use_dora=false and adapter.lora_dropout=0, or name linear layers other than experts in "
            "adapter.target_modules, such as [q_proj, k_proj, v_proj, o_proj]."
        ) from error
    lora_config.base_model_name_or_path = base_name or lora_config.base_model_name_or_path
    lora_config.revision = base_revision
    layers = adapted_layers(model)
    if saved_modules:
        if both := sorted(
            name for name in layers if any(f"{name}.".startswith(f"{one}.") for one in saved_modules)
        ):
            Handle(*undo, peft_model.unload).remove()
            raise UserError(
                f"adapter.modules_to_save trains a module whole, and {both[0]} has an adapter, too. Leave it out of "
                "adapter.modules_to_save or adapter.target_modules."
            )
        for module in saved_modules.values():
            module.requires_grad_(True)
        lora_config.modules_to_save = list(config.modules_to_save)
        lora_config.ensure_weight_tying = is_tied(model)
    own_weights = {weight for module in saved_modules.values() for weight in module.parameters()}
    take_off = [peft_model.unload]
    if config.train_new_tokens:
        take_off += train_rows(model, new_rows)
        lora_config.trainable_token_indices = peft_setting(model)
        own_weights |= trained_parameters(model)
    if whole is not None and targets == ALL_LINEAR:
        # PEFT has made it a list of every layer's name; in the files it is a short pattern.
        lora_config.target_modules = sorted({short_name(name) for name in layers})
    for layer in layers.values():
        existing(layer, "_cast_input_dtype")  # raises if PEFT has renamed it: ours would never be called
        layer._cast_input_dtype = _cast_unless_autocast
    _log(model, config, layers, saved_modules)
    return Lora(model, peft_model, *undo, *take_off, whole=whole, own_weights=own_weights)


@contextlib.contextmanager
def without_pefts_warnings() -> Iterator[None]:
    """Suppress, while PEFT inserts its layers, the warnings that no user can act on."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="fan_in_fan_out is set to False"
        )  # PEFT then does what is right
        # What is missing from a file is an error here, not a warning.
        warnings.filterwarnings("ignore", message="Found missing adapter keys")
        # PEFT asks a transformers 5 model by an old name.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        yield


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


def _take_layers_off(model: nn.Module) -> None:
    """Remove the layers that PEFT leaves behind when it gives up half-way."""
    for name, layer in adapted_layers(model).items():
        model.set_submodule(name, layer.get_base_layer())


def _made_in_float32() -> Handle:
    """Make PEFT create adapters in float32: it takes their layer's type and casts later, a start rounded to 16 bits."""
    from peft.tuners.lora import LoraLayer

    ask_layer = existing(LoraLayer, "_get_base_layer_device_and_dtype")

    def device_and_float32(layer: Any, base_layer: Any) -> tuple[torch.device | None, torch.dtype]:
        return ask_layer(layer, base_layer)[0], torch.float32

    return Handle(set_attribute(LoraLayer, "_get_base_layer_device_and_dtype", device_and_float32))


@contextlib.contextmanager
def _experts_as_float32(model: nn.Module) -> Iterator[None]:
    """Show PEFT, while it adds adapters, one element for each tensor of experts, expanded to the weights' own shape.

    It takes an adapter's shape and type from the parameter, and a packed one has neither.
    """
    own = {
        (module, name): module._parameters[name]
        for module in model.modules()
        for name in weights_of(module)
        if name in module._parameters  # of a base in MXFP4 it has other names
    }
    for (module, name), weight in own.items():
        assert weight is not None
        element = torch.zeros((), dtype=torch.float32, device=weight.device)
        module._parameters[name] = nn.Parameter(element.expand(logical_shape(weight)), requires_grad=False)
    try:
        yield
    finally:
        for (module, name), weight in own.items():
            assert weight is not None
            weight.requires_grad = False
            module._parameters[name] = weight


def _restore_requires_grad(model: nn.Module) -> list[Callable[[], object]]:
    return [
        partial(parameter.requires_grad_, parameter.requires_grad)
        for parameter in model.parameters()
        if parameter.is_floating_point()
    ]


def _restore_config(model: PreTrainedModel) -> list[Callable[[], object]]:
    """Restore ``pretraining_tp`` of a config that has it, which PEFT sets to 1."""
    if not hasattr(model.config, "pretraining_tp"):
        return []
    return [partial(setattr, model.config, "pretraining_tp", model.config.pretraining_tp)]


def _is_of_adapter(name: str) -> bool:
    return "lora_" in name


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Return PEFT's layers of a model, by their names."""
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def other_state(layer: Any) -> str:
    """Return what keeps a layer of PEFT from being its base plus one adapter at the moment; empty: nothing."""
    if layer.disable_adapters:
        return "disabled adapters"
    if layer.merged:
        return "merged adapters"
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(active) != 1:
        return f"{len(active)} active adapters"
    # ZeRO-3 gathers a module's weights when that module is called.
    return "weights that ZeRO-3 has cut" if is_partitioned(layer.lora_A[active[0]].weight) else ""


def _cast_unless_autocast(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Replace PEFT's cast of a layer's input to its adapter's type, unless autocast is on.

    Autocast rounds the input back to 16 bits: the same numbers, after a copy of 4 bytes an element and one of 2 that
    backward would keep, for each of the layers that share the input.
    """
    if x is None or torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(dtype)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a saved adapter by the names in its file.

    Raises:
        CheckpointError: if the folder has no such file, or the file is damaged.
    """
    try:
        return load_file(folder / WEIGHTS_FILE)
    except OSError as error:
        raise CheckpointError(f"{folder} holds no adapter: {error}.") from error
    except SafetensorError as error:
        raise CheckpointError(
            f"{folder / WEIGHTS_FILE} is damaged: {error}. Save the adapter again."
        ) from error


def _compare(
    live: Mapping[str, Tensor], saved: Mapping[str, Tensor], problem: str, *, by_value: bool = True
) -> None:
    def is_same(name: str) -> bool:
        one, other = live.get(name), saved.get(name)
        if one is None or other is None or whole_shape(one) != other.shape or one.dtype != other.dtype:
            return False
        return not by_value or torch.equal(
            one.cpu().view(torch.uint8), other.view(torch.uint8)
        )  # NaN equals NaN

    different = [name for name in sorted({*live, *saved}) if not is_same(name)]
    if different:
        raise CheckpointError(f"{problem}: {len(different)} tensors differ, such as {different[0]}.")


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
