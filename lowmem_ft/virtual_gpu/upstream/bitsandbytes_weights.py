"""4-bit and 8-bit weights on a virtual GPU: the tensors that bitsandbytes' layers hold on CUDA, as fake ones.

Nothing here imports bitsandbytes: its layers exist only where the program has imported it.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes


def place_bitsandbytes(module: nn.Module, device: torch.device) -> list[Tensor]:
    """Quantise a layer's weight on the virtual device, as moving it to CUDA does.

    Args:
        module: any module; only bitsandbytes' quantised layers change. Their weight may be on meta, or hold values.
        device: the virtual device, whose ``FakeTensorMode`` is active.

    Returns:
        The tensors that the layer now holds in addition to its weight: scales and tables; empty for other layers.
    """
    bitsandbytes: Any = sys.modules.get("bitsandbytes")
    if bitsandbytes is None:
        return []
    weight: Any = module._parameters.get("weight")
    if weight is None or _is_placed(weight, device):
        packed = [
            name
            for name, parameter in module._parameters.items()
            if isinstance(parameter, bitsandbytes.nn.Params4bit) and not _is_placed(parameter, device)
        ]
        return [tensor for name in packed for tensor in _place_packed(module, name, device)]
    if isinstance(weight, bitsandbytes.nn.Params4bit):
        return _place_4bit(bitsandbytes.functional, module, weight, device)
    if isinstance(weight, bitsandbytes.nn.Int8Params) and not weight.has_fp16_weights:
        return _place_int8(bitsandbytes.functional, module, weight, device)
    return []


def statistics_of(owner: Tensor | nn.Module) -> list[Tensor]:
    """Return the scales and tables of a 4-bit parameter, or of its layer; an empty list for others."""
    state: Any = getattr(owner, "quant_state", None)
    if state is None:
        return []
    scales = [state, state.state2] if state.nested else [state]
    statistics = [tensor for scale in scales for tensor in (scale.absmax, scale.code, scale.offset)]
    return [tensor for tensor in statistics if tensor is not None]


def new_parameter(
    new: Callable[..., Any], cls: type, data: Tensor | None = None, *args: Any, **kwargs: Any
) -> Any:
    """Make one of bitsandbytes' parameters, of a fake tensor too: layers may be built while tracing.

    Args:
        new: ``__new__`` of the class.
        cls: the class.
        data: the values.
        args: further arguments of the class.
        kwargs: the same.
    """
    if not isinstance(data, FakeTensor):
        return new(cls, data, *args, **kwargs)
    with _disable_current_modes():
        like = new(cls, torch.empty(0), *args, **kwargs)
    return _fake_parameter(data, like=like, requires_grad=like.requires_grad)


def _is_placed(tensor: Tensor | None, device: torch.device) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.device == device


def _place_4bit(functional: Any, module: Any, weight: Any, device: torch.device) -> list[Tensor]:
    before = weight.quant_state or weight  # one that was quantised elsewhere keeps its shape and type there
    dtype = before.dtype if before.dtype.is_floating_point else module.compute_dtype or torch.bfloat16
    parameter = _quantized(functional, weight, torch.empty(before.shape, dtype=dtype, device=device))
    module._parameters["weight"], module.quant_state = parameter, parameter.quant_state
    return statistics_of(parameter)


def _place_packed(module: nn.Module, name: str, device: torch.device) -> list[Tensor]:
    """Move a parameter that has been packed on meta, as fused experts are, and the state that belongs to it."""
    packed: Any = module._parameters[name]
    on_device = torch.empty(packed.shape, dtype=packed.dtype, device=device)
    module._parameters[name] = parameter = _fake_parameter(on_device, like=packed)
    for scale in (packed.quant_state, packed.quant_state.state2):
        for part in ("absmax", "code", "offset"):
            tensor = getattr(scale, part)
            if tensor is not None:
                setattr(scale, part, torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
    return statistics_of(parameter)


@torch.no_grad()
def _quantized(functional: Any, weight: Any, values: Tensor) -> Any:
    """Return a 4-bit parameter with the settings of ``weight``, made from values on the virtual device."""
    packed, state = functional.quantize_4bit(
        values,
        blocksize=weight.blocksize,
        compress_statistics=weight.compress_statistics,
        quant_type=weight.quant_type,
        quant_storage=weight.quant_storage,
    )
    parameter = _fake_parameter(packed, like=weight)
    parameter.quant_state, parameter.bnb_quantized = state, True
    return parameter


def _quantized_for_layer(functional: Any, weight: Any, values: Tensor) -> Any:
    """Return the same, and keep the scales with its layer too: FSDP gathers a weight without them."""
    parameter = _quantized(functional, weight, values)
    if weight.module is not None:
        weight.module.quant_state = parameter.quant_state
    return parameter


@torch.no_grad()
def _place_int8(functional: Any, module: nn.Module, weight: Any, device: torch.device) -> list[Tensor]:
    values = torch.empty(weight.shape, dtype=weight.dtype, device=device)
    module._parameters["weight"] = parameter = _quantized_to_8bit(functional, weight, values)
    return [parameter.SCB]


def _quantized_to_8bit(functional: Any, weight: Any, values: Tensor) -> Any:
    """Return an 8-bit parameter like ``weight``, made from values on the virtual device."""
    rows, scales, _ = functional.int8_vectorwise_quant(values.to(torch.float16))
    parameter = _fake_parameter(rows, like=weight)
    parameter.CB, parameter.SCB = rows, scales
    return parameter


def _fake_parameter(tensor: Tensor, *, like: nn.Parameter, requires_grad: bool = False) -> Any:
    """Return a fake tensor that passes for bitsandbytes' parameter class, which libraries check by type and by name."""
    parameter: Any = nn.Parameter(tensor, requires_grad=requires_grad)
    own = vars(parameter)
    own.update({name: value for name, value in vars(like).items() if name not in own})
    parameter.__class__ = _fake_class(type(like))
    return parameter


@functools.cache
def _fake_class(parameter_class: type) -> type:
    if issubclass(parameter_class, FakeTensor):
        return parameter_class
    methods = {"to": _to, "detach": _detach, "__deepcopy__": _deepcopy}
    return type(parameter_class.__name__, (FakeTensor, parameter_class), methods)


def _to(self: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Move without making a new parameter where nothing moves; quantise one that still holds plain values."""
    moved = torch.Tensor.to(self, *args, **kwargs)
    functional = sys.modules["bitsandbytes.functional"]
    if not self.is_floating_point() or moved.device.type == "meta" or moved.dtype != self.dtype:
        return moved
    if hasattr(self, "bnb_quantized"):
        return moved if self.bnb_quantized else _quantized_for_layer(functional, self, moved)
    is_from_host = self.device.type == "cpu" and not self.has_fp16_weights
    return _quantized_to_8bit(functional, self, moved) if is_from_host else moved


def _deepcopy(self: Any, memo: dict[int, Any]) -> Tensor:
    """Copy with storages of its own, for PEFT copies a 4-bit layer for DoRA."""
    copied = _fake_parameter(
        torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device=self.device), like=self
    )
    if getattr(self, "quant_state", None) is not None:
        copied.quant_state = _copied_state(self.quant_state)
    return copied


def _copied_state(state: Any) -> Any:
    copied = copy.copy(state)
    for name, value in vars(state).items():
        if isinstance(value, Tensor):
            setattr(copied, name, value.clone())
        elif isinstance(value, type(state)):
            setattr(copied, name, _copied_state(value))
    return copied


def _detach(self: Any) -> Tensor:
    """Detach into the same class, as ``Module.to`` requires."""
    alias: Any = torch.Tensor.detach(self)
    own = vars(alias)
    own.update({name: value for name, value in vars(self).items() if name not in own})
    alias.__class__ = type(self)
    return alias
