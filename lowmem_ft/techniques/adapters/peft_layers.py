"""PEFT's layers in a model: how they are made, found again and asked for their state."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.handle import Handle
from lowmem_ft.foundation.tensors.local_shards import is_partitioned
from lowmem_ft.foundation.tensors.logical_size import logical_shape
from lowmem_ft.foundation.upstream.grouped_experts import weights_of
from lowmem_ft.foundation.upstream.patches import existing
from lowmem_ft.techniques.modules.patching import set_attribute


def add_layers(model: PreTrainedModel, lora_config: Any) -> Any:
    """Return PEFT's wrapper of a model, whose layers now have adapters in float32.

    Raises:
        UserError: if PEFT has no such adapter for one of the layers; the model then has its own layers.
    """
    from peft import get_peft_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    existing(BaseTunerLayer, "_cast_input_dtype")  # raises if PEFT has renamed it: ours would never be called
    try:
        with without_pefts_warnings(), _made_in_float32(), _experts_as_float32(model):
            peft_model = get_peft_model(model, lora_config)
    except ValueError as error:
        _take_layers_off(model)
        raise UserError(
            f"PEFT does not support such an adapter for a layer of {type(model).__name__}: {error} Set "
            "adapter.use_dora=false and adapter.lora_dropout=0, or name linear layers other than experts in "
            "adapter.target_modules, such as [q_proj, k_proj, v_proj, o_proj]."
        ) from error
    for layer in adapted_layers(model).values():
        layer._cast_input_dtype = _cast_unless_autocast
    return peft_model


def tensors_of_adapters(peft_model: Any) -> dict[str, Tensor]:
    """Return the tensors that PEFT saves of a model, by their names in it, as they are: sharded ones stay sharded."""
    from peft import get_peft_model_state_dict

    present = dict(peft_model.named_parameters(remove_duplicate=False)) | dict(peft_model.named_buffers())
    saved = {
        id(tensor)
        for adapter in peft_model.peft_config
        for tensor in get_peft_model_state_dict(peft_model, present, adapter_name=adapter).values()
    }
    return {name: tensor for name, tensor in present.items() if id(tensor) in saved}


@contextlib.contextmanager
def without_pefts_warnings() -> Iterator[None]:
    """Suppress, while PEFT inserts its layers, the warnings that no user can act on."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="fan_in_fan_out is set to False"
        )  # PEFT then does what is right
        # What is missing from a file is an error here, not a warning.
        warnings.filterwarnings("ignore", message="Found missing adapter keys")
        # PEFT gives patterns of its own to experts that are one parameter, and then looks for modules of that name.
        warnings.filterwarnings("ignore", message=r"The following (rank|alpha)_pattern keys did not match")
        # PEFT asks a transformers 5 model by an old name.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        yield


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
    """Show PEFT, while it adds adapters, one element for all tensors of experts, expanded to the weights' own shapes.

    It takes an adapter's shape and type from the parameter, and a packed one has neither.
    """
    own = {
        (module, name): module._parameters[name]
        for module in model.modules()
        for name in weights_of(module)
        if name in module._parameters  # of a base in MXFP4 it has other names
    }
    elements: dict[torch.device, Tensor] = {}
    for (module, name), weight in own.items():
        assert weight is not None
        if weight.device not in elements:
            elements[weight.device] = torch.zeros((), dtype=torch.float32, device=weight.device)
        element = elements[weight.device].expand(logical_shape(weight))
        module._parameters[name] = nn.Parameter(element, requires_grad=False)
    try:
        yield
    finally:
        for (module, name), weight in own.items():
            assert weight is not None
            weight.requires_grad = False
            module._parameters[name] = weight


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Return PEFT's layers of a model, by their names."""
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def active_adapter(layer: Any) -> tuple[str, str]:
    """Return the active adapter of a layer of PEFT, and what keeps the layer from being its base plus that one.

    A step asks at each call of a layer, so that this reads what PEFT's properties would return.

    Either is empty: the name if there is not one such adapter, the other if nothing does.
    """
    if layer._disable_adapters:
        return "", "disabled adapters"
    if layer.merged_adapters:
        return "", "merged adapters"
    active, adapters = layer._active_adapter, layer._modules["lora_A"]._modules
    names = [name for name in ((active,) if isinstance(active, str) else active) if name in adapters]
    if len(names) != 1:
        return "", f"{len(names)} active adapters"
    # ZeRO-3 gathers a module's weights when that module is called.
    if is_partitioned(adapters[names[0]].weight):
        return "", "weights that ZeRO-3 has cut"
    return names[0], ""


def _cast_unless_autocast(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Replace PEFT's cast of a layer's input to its adapter's type, unless autocast is on.

    Autocast rounds the input back to 16 bits: the same numbers, after a copy of 4 bytes an element and one of 2 that
    backward would keep, for each of the layers that share the input.
    """
    if x is None or torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(dtype)
