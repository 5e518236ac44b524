"""The tensors that a module computes with, and ways to point it at other memory.

A parameter remains its module's own object throughout: optimizers, hooks and ties refer to it. Only the memory behind
it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from lowmem_ft.foundation.devices import has_values


@dataclass(frozen=True)
class StreamedTensor:
    """A tensor with all the attributes that hold it.

    Args:
        tensor: its current tensor.
        holders: objects and the names of their attributes.
    """

    tensor: Tensor
    holders: tuple[tuple[Any, str], ...]

    def point_at(self, tensor: Tensor) -> None:
        """Point the holders at a tensor of the same shape and type."""
        for holder, attribute in self.holders:
            setattr(holder, attribute, tensor)


def streamed_tensors(module: nn.Module, name: str, stub: Tensor) -> Iterator[StreamedTensor]:
    """Yield a parameter's own tensor, and the statistics that a quantised one has.

    Args:
        module: the module that holds the parameter.
        name: the parameter's name in the module.
        stub: a tensor of the parameter's shape and type, on the device that will use it.
    """
    values = module._parameters[name].data  # type: ignore[union-attr]
    parameter: Any = _move_parameter(module, name, stub)
    holders = [(parameter, "data")]
    quantized: Any = module
    if getattr(parameter, "quant_state", None) is not None:  # bitsandbytes, 4 bits
        yield from _scales_of(parameter.quant_state, stub.device)
    elif hasattr(parameter, "has_fp16_weights"):  # bitsandbytes, 8 bits
        if getattr(parameter, "CB", None) is not None:
            quantized.init_8bit_state()
        quantized.state.SCB = quantized.state.SCB.to(stub.device)
        holders.append((quantized.state, "CB"))
    yield StreamedTensor(values, tuple(holders))


def _move_parameter(module: nn.Module, name: str, tensor: Tensor) -> nn.Parameter:
    """Give a parameter another tensor, possibly on another device, as ``Module.to`` does.

    Returns:
        The parameter, or a new one if torch cannot change the device of an existing one: fake tensors only.
    """
    parameter = module._parameters[name]
    assert parameter is not None
    if torch._has_compatible_shallow_copy_type(parameter, tensor):
        parameter.data = tensor
        return parameter
    moved = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
    own = vars(moved)
    own.update({key: value for key, value in vars(parameter).items() if key not in own})
    if isinstance(parameter, type(moved)):
        moved.__class__ = type(parameter)  # bitsandbytes' own
    module._parameters[name] = moved
    return moved


def move_the_rest(module: nn.Module, device: torch.device, waiting: set[nn.Parameter]) -> None:
    """Move all parameters and buffers to a device, except those kept on the host."""
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is None or parameter in waiting or parameter.device == device:
                continue
            if parameter not in moved:
                moved[parameter] = _move_parameter(part, name, parameter.data.to(device))
            part._parameters[name] = moved[parameter]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to(device)


def stand_in(module: nn.Module, weight: nn.Parameter) -> Callable[[], None]:
    """Replace a module's weight by a parameter; the call returned restores the original."""
    own = module._parameters["weight"]
    module._parameters["weight"] = weight
    return partial(module._parameters.__setitem__, "weight", own)


def with_own_storage(view: Tensor) -> Tensor:
    """Return the same memory with a storage that begins and ends with the view, so that it does not seem shared."""
    if not has_values(view) or not view.nbytes:
        return view  # there is no memory
    with _disable_current_modes():  # a storage tracker would take it for new memory
        return torch.from_numpy(view.view(-1).view(torch.uint8).numpy()).view(view.dtype).view(view.shape)


def _scales_of(state: Any, device: torch.device) -> Iterator[StreamedTensor]:
    """Yield the scales of blocks, one for 64 weights; the tables are small and stay on the device."""
    scales = [state, state.state2] if state.nested else [state]
    for scale in scales:
        scale.code = scale.code.to(device)
        yield StreamedTensor(scale.absmax, ((scale, "absmax"),))
    if state.nested:
        state.offset = state.offset.to(device)
