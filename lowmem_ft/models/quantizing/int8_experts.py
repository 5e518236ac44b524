"""Fused experts in 8 bits, in bitsandbytes' own storage: int8, with the largest magnitude of each row in float32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_LARGEST = 127


class Int8Packing:
    """An 8-bit parameter that experts are written into.

    Args:
        shape: shape of all weights: (E, O, I), or (E, I, O) if they are transposed.
        like: weights of some experts, for their device.
        is_transposed: whether an expert's rows, one for each output, are its columns here.
    """

    def __init__(self, shape: tuple[int, ...], like: Tensor, *, is_transposed: bool) -> None:
        self._packed, self._is_transposed = like.new_empty(shape, dtype=torch.int8), is_transposed
        self._rows = self._packed.transpose(1, 2) if is_transposed else self._packed
        self._scales = like.new_empty(self._rows.shape[:2], dtype=torch.float32)

    def write(self, experts: slice, values: Tensor) -> None:
        """Pack some experts' weights, shape (number of them, O, I) or (..., I, O)."""
        import bitsandbytes  # noqa: F401  # defines the operator

        exact = values.transpose(1, 2) if self._is_transposed else values
        codes, scales, _ = torch.ops.bitsandbytes.int8_vectorwise_quant(
            exact.to(torch.float16).reshape(-1, exact.shape[2]), 0.0
        )
        self._rows[experts] = codes.view(exact.shape)
        self._scales[experts] = scales.view(exact.shape[:2])

    def parameter(self) -> nn.Parameter:
        """Return a parameter of the shape of the weights: for each expert the values of a ``Linear8bitLt`` of its own.

        Its attribute ``row_scales`` has the largest magnitude of each row, shape (E, O, 1) or (E, 1, O).
        """
        parameter = nn.Parameter(self._packed, requires_grad=False)
        parameter.row_scales = self._scales.unsqueeze(1 if self._is_transposed else 2)  # type: ignore[attr-defined]
        return parameter


def unpack(packed: Tensor, scales: Tensor, experts: slice, dtype: torch.dtype) -> Tensor:
    """Return some experts' weights in a type, as ``Linear8bitLt`` computes them for its backward pass."""
    return packed[experts].to(dtype).mul_(scales[experts] / _LARGEST)


class Int8Weight:
    """The weight that :class:`Int8Packing` has made of a module's tensor.

    Its scales become a buffer, which moves with it.

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
