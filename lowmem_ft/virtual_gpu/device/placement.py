"""Placement of a model built on the meta device: every parameter and buffer gets a storage on the virtual device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lowmem_ft.virtual_gpu.upstream.bitsandbytes_weights import place_bitsandbytes

OnPlaced = Callable[[str, Tensor], None]
"""Called with the name of the module and the new tensor."""


def place_module(
    model: nn.Module,
    device: torch.device,
    on_placed: OnPlaced,
    new_parameter: Callable[[nn.Parameter], Tensor] | None = None,
) -> None:
    """Give each parameter and buffer a fake tensor on a device, in place; tied weights stay tied.

    ``Module.to`` cannot do it: fake tensors cannot be swapped into existing parameters.

    Args:
        model: its parameters may be on meta or hold values, which are not copied.
        device: the tracing machine's device; its ``FakeTensorMode`` is active.
        on_placed: called for each tensor.
        new_parameter: makes the tensor that replaces a parameter; None: a tensor of its shape and strides.
    """
    placed: dict[int, Tensor] = {}
    originals: list[Tensor] = []  # kept alive, as they are identified by id

    def place(name: str, tensor: Tensor) -> Tensor:
        if id(tensor) not in placed:
            originals.append(tensor)
            placed[id(tensor)] = tensor if _is_on(device, tensor) else _on(device, tensor, new_parameter)
            on_placed(name, placed[id(tensor)])
        return placed[id(tensor)]

    for name, module in model.named_modules():
        for tensor in place_bitsandbytes(module, device):
            on_placed(name, tensor)
            weight = module._parameters.get("weight")
            if new_parameter is not None and weight is not None:
                weight.data = new_parameter(weight)
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                if tensor is not None:
                    tensors[key] = place(name, tensor)  # type: ignore[assignment]


def _is_on(device: torch.device, tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.device == device


def _on(
    device: torch.device, tensor: Tensor, new_parameter: Callable[[nn.Parameter], Tensor] | None
) -> Tensor:
    with torch.no_grad():
        if new_parameter is not None and isinstance(tensor, nn.Parameter):
            new = new_parameter(tensor)
        else:
            new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if not isinstance(tensor, nn.Parameter):
        return new
    parameter = nn.Parameter(new, requires_grad=tensor.requires_grad)
    own = vars(parameter)
    own.update(
        {name: value for name, value in vars(tensor).items() if name not in own}
    )  # attributes that libraries set on it
    return parameter
