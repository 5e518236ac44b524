"""The layers that get an adapter, by the names that PEFT is asked for: without routers, and packed experts."""

from __future__ import annotations

import functools
import inspect
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lowmem_ft.foundation.errors import did_you_mean, raise_problems
from lowmem_ft.foundation.tensors.logical_size import has_packed_experts
from lowmem_ft.foundation.upstream.patches import existing
from lowmem_ft.techniques.adapters.config import AdapterConfig
from lowmem_ft.techniques.adapters.whole_model import WholeModel
from lowmem_ft.techniques.modules.model_parts import ModelParts

logger = logging.getLogger(__name__)

ALL_LINEAR = "all-linear"

_WITHOUT_ADAPTERS = ", and so do packed experts"


def target_modules(
    model: PreTrainedModel, config: AdapterConfig, whole: WholeModel | None
) -> str | list[str]:
    """Return the modules to request from PEFT, which would ignore an unmatched name as long as another one matches."""
    others = set(with_another_forward(model))
    linear = [name for name in _linear_layers(model) if name not in others]
    short_names = sorted({short_name(name) for name in linear})
    of_experts = _names_of_experts(model)
    if config.target_modules == (ALL_LINEAR,):
        routers, bypassed = _names_of_routers(model), _names_of_bypassed_layers(model)
        is_packed = has_packed_experts(model)
        if not (of_experts or routers or is_packed or bypassed or config.target_parameters):
            return ALL_LINEAR
        left_out = (
            {name for name, module in model.named_modules() if module is model.get_output_embeddings()}
            | routers
            | bypassed
        )
        if of_experts or routers or is_packed:
            logger.info(
                "Adapter: routers stay frozen%s.",
                _WITHOUT_ADAPTERS if is_packed and not config.target_parameters else "",
            )
        if bypassed:
            logger.info(
                "Adapter: left out %s, as %s reads their weights without calling them.",
                ", ".join(sorted(bypassed)),
                type(model).__name__,
            )
        keeps_experts_out = is_packed or config.target_parameters
        names = {*short_names} - of_experts if keeps_experts_out else {*short_names} | of_experts
        return sorted(names - left_out)
    way_out = f"It has {', '.join(short_names)}; or write [all-linear] alone."
    problems: list[str] = []
    for target in config.target_modules:
        if _first_named(target, (*linear, *_renamed_by_peft(model))) is not None:
            continue
        if whole is not None and (other := _first_named(target, whole.layers())) is not None:
            problems.append(
                f"adapter.target_modules names layers of the language model, the only part trained, but {target!r} is "
                f"a layer of another part ({other}). Name layers of {type(model).__name__}. {way_out}"
            )
            continue
        problems.append(
            f"adapter.target_modules names linear layers, and {type(model).__name__} has no linear layer "
            f"{target!r}.{did_you_mean(target, [*short_names, ALL_LINEAR])} {way_out}"
        )
    named = {target.rpartition(".")[2] for target in config.target_modules}
    if bypassed := named & _names_of_bypassed_layers(model):
        problems.append(
            "adapter.target_modules names layers whose adapters have an effect, got "
            f"{', '.join(sorted(bypassed))}: {type(model).__name__} reads that weight without calling the layer. Leave "
            "it out, or write [all-linear] alone."
        )
    raise_problems(problems)
    return list(config.target_modules)


def short_name(name: str) -> str:
    """Return the last part of a name, with a list's name before an index: an index alone selects decoder layers."""
    _, of_list, last = f"..{name}".rsplit(".", 2)
    return f"{of_list}.{last}" if last.isdigit() else last


def _names_of_experts(model: PreTrainedModel) -> frozenset[str]:
    """Return the names that PEFT takes for a family's fused experts, which were linear layers of these names once."""
    return frozenset(old for old, new in _renamed_by_peft(model).items() if new != f"{old}.weight")


def _names_of_routers(model: PreTrainedModel) -> set[str]:
    """Return the names of what chooses a token's experts: linear layers, or for families PEFT knows, parameters."""
    names = {old for old, new in _renamed_by_peft(model).items() if new == f"{old}.weight"}
    for block in model.modules():
        experts = getattr(block, "experts", None)
        num_experts = getattr(experts, "num_experts", None) or (
            len(experts) if isinstance(experts, nn.ModuleList) else None
        )
        names |= {
            name
            for name, layer in block.named_children()
            if isinstance(layer, nn.Linear) and layer.out_features == num_experts
        }
    return names


@functools.cache
def source_of(kind: type) -> str:
    """Return the source of a module's class."""
    return inspect.getsource(kind)


def _names_of_bypassed_layers(model: PreTrainedModel) -> set[str]:
    """Return the names of layers whose weights are read without calling them: no adapter of theirs would be trained.

    They are a Mamba mixer's, whose weights fused kernels read, and Gemma 3n's corrections, which it clamps. Mixers with
    the same decay ``A_log`` that call their layers (gated delta nets) are recognised by their source.
    """
    is_clamped = getattr(model.config.get_text_config(), "altup_coef_clip", None) is not None
    clamped = {"correction_coefs"} if is_clamped else set()
    return clamped | {
        name
        for mixer in model.modules()
        if "A_log" in mixer._parameters
        for name, layer in mixer.named_children()
        if isinstance(layer, nn.Linear)
        and re.search(rf"self\.{name}\.weight\b(?!\.)", source_of(type(mixer)))
    }


def _renamed_by_peft(model: PreTrainedModel) -> Mapping[str, str]:
    from peft.utils import transformers_weight_conversion as conversion

    family = existing(conversion, "_MODEL_TO_CONVERSION_PATTERN").get(model.config.model_type)
    return existing(conversion, "_MOE_TARGET_MODULE_MAPPING").get(family, {})


def _first_named(target: str, names: Iterable[str]) -> str | None:
    """Return the first layer that a target of PEFT names; None: it names no layer."""
    return next((name for name in names if name == target or name.endswith(f".{target}")), None)


def _linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))}


def with_another_forward(model: nn.Module) -> list[str]:
    """Return the names of linear layers by class alone, whose output is no product: routers (Llama 4), groups of heads.

    PEFT would add its own product to whatever they return.
    """
    return [
        name
        for name, module in _linear_layers(model).items()
        if type(module).forward not in (nn.Linear.forward, Conv1D.forward)
        and not type(module).__module__.startswith("bitsandbytes.")
        and not hasattr(module, "unpacked_weight")  # in fewer bits
        and not _returns_a_product(module)
    ]


def outside_text(model: nn.Module) -> list[str]:
    """Return the names of linear layers that are not in the stack of text, of a model that has towers, too."""
    config: Any = getattr(model, "config", None)
    if config is None or config.get_text_config() is config:
        return []
    parts = ModelParts(model)
    stacks = parts.stacks
    if len(stacks) < 2 or (text := parts.stacks_by_kind.get("language")) is None:
        return []
    (inside,) = (f"{name}." for name, stack in stacks.items() if stack is text)
    return [name for name in _linear_layers(model) if not name.startswith(inside)]


@torch.no_grad()
def _returns_a_product(layer: Any) -> bool:
    """Return whether a layer with a forward of its own takes a row of inputs to one of outputs, as Falcon's do."""
    num_outputs, num_inputs = layer.weight.shape
    try:
        output = layer(layer.weight.new_zeros(1, 2, num_inputs))
    except (RuntimeError, TypeError, ValueError, LookupError):
        return False
    return isinstance(output, Tensor) and output.shape == (1, 2, num_outputs)
