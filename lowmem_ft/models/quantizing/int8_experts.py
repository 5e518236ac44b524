"""Fused experts in 8 bits, in bitsandbytes' own storage: int8, with the largest magnitude of each row in float32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_LARGEST = 127

_CAST_BYTES = 2**26
"""Most bytes of experts that are cast to float16 at once, which bitsandbytes' operator takes, unless one has more."""


@torch.no_grad()
def pack(values: Tensor, *, is_transposed: bool) -> nn.Parameter:
    """Return an 8-bit parameter of experts.

    Args:
        values: shape (E, O, I), or (E, I, O) if it is transposed, in a floating type.
        is_transposed: whether an expert's rows, one for each output, are its columns here.

    Returns:
        A parameter of the shape of ``values``: for each expert the values of a ``Linear8bitLt`` of its own. Its
        attribute ``row_scales`` has the largest magnitude of each row, shape (E, O, 1) or (E, 1, O).
    """
    import bitsandbytes  # noqa: F401  # defines the operator

    packed = torch.empty_like(values, dtype=torch.int8, memory_format=torch.contiguous_format)
    rows = packed.transpose(1, 2) if is_transposed else packed
    scales = torch.empty(rows.shape[:2], dtype=torch.float32, device=values.device)
    at_once = max(1, _CAST_BYTES // (2 * values[0].numel()))
    for first in range(0, len(values), at_once):
        some = slice(first, first + at_once)
        exact = values[some].transpose(1, 2) if is_transposed else values[some]
        found = torch.ops.bitsandbytes.int8_vectorwise_quant(
            exact.to(torch.float16).reshape(-1, exact.shape[2]), 0.0
        )
        rows[some] = found[0].view(exact.shape)
        scales[some] = found[1].view(exact.shape[:2])
    parameter = nn.Parameter(packed, requires_grad=False)
    parameter.row_scales = scales.unsqueeze(1 if is_transposed else 2)  # type: ignore[attr-defined]
    return parameter


def unpack(packed: Tensor, scales: Tensor, experts: slice, dtype: torch.dtype) -> Tensor:
    """Return some experts' weights in a type, as ``Linear8bitLt`` computes them for its backward pass."""
    return packed[experts].to(dtype).mul_(scales[experts] / _LARGEST)


class Int8Weight:
    """The weight that :func:`pack` has made of a module's tensor; its scales become a buffer, which moves with it.

    Args:
        module: an experts module.
        name: name of the parameter, which is looked up at each use.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name, self._scales = module, name, f"{name}_row_scales"
        weight = module.get_parameter(name)
        self.shape = tuple(weight.shape)
        module.register_buffer(self._scales, vars(weight).pop("row_scales"), persistent=False)

    def unpack(self, experts: slice, dtype: torch.dtype) -> Tensor:
        """Return some experts' weights in a type."""
        values, scales = self.module.get_parameter(self.name).data, self.module.get_buffer(self._scales)
        return unpack(values, scales, experts, dtype)
