"""Autograd functions around Liger's kernels that spend less of the host's time at each launch than Liger's own.

Liger enters a device's context, asks for settings and loops over all arguments at each call, which takes longer than a
launch. These launch the same kernels with the same arguments, so that all bits are equal, and leave to Liger what is
rare: a device that is not the current one, ``DTensor``, tiles of wide rows, angles of other shapes. Where a norm's
gradient gets memory of its own, that is not filled with zeros first; the kernel writes all of it.

Source: liger-kernel 0.8.5, ``ops/rms_norm.py``, ``swiglu.py``, ``rope.py``.

Axes: N rows of a kernel, D numbers of a row; B rows of a batch, T tokens, H heads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowmem_ft.foundation.devices import kernels_of
from lowmem_ft.foundation.tensors.local_shards import is_sharded

VERSION = "0.8.5"
"""The release whose kernels these launch; with another, Liger's own functions do."""

_FEW_COLUMNS, _MANY_ROWS, _ROWS_OF_A_BLOCK = 256, 4096 * 8, 16
"""From so many rows on of at most so many numbers each, a program of a norm takes several."""


@dataclass(frozen=True)
class _Liger:
    """Modules of Liger's kernels, and its own functions."""

    rms_norm: Any
    rope: Any
    swiglu: Any
    norm_forward: Callable[..., Tensor]
    turn: Callable[..., tuple[Tensor, Tensor]]


@functools.cache
def ligers() -> _Liger:
    """Import Liger's kernels."""
    from liger_kernel.ops import LigerRopeFunction, rms_norm, rope, swiglu
    from liger_kernel.transformers.rms_norm import LigerRMSNorm

    return _Liger(rms_norm, rope, swiglu, LigerRMSNorm.forward, LigerRopeFunction.apply)


def norm(self: Any, hidden_states: Tensor) -> Tensor:
    """Compute a module's RMSNorm; in place of the forward of Liger's class, whose attributes the module has."""
    weight = self.weight
    if weight is None or not _is_here(hidden_states):
        return ligers().norm_forward(self, hidden_states)
    return _Norm.apply(
        hidden_states,
        weight,
        self.variance_epsilon,
        self.offset,
        self.casting_mode,
        self.in_place,
        self.row_mode,
    )


def rotary(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Turn queries and keys, B x H x T x D, in place where they are transposed already."""
    if cos.ndim != 3 or not _is_here(query):
        return ligers().turn(query, key, cos, sin, None, unsqueeze_dim)
    return _Rotary.apply(query, key, cos, sin)


def can_gate(gate: Tensor) -> bool:
    """Return whether :class:`SwiGLU` takes such a gate, without multipliers."""
    width = gate.shape[-1]
    is_wide = _settings(width)[0] >= ligers().swiglu._SWIGLU_TILE_MIN_BLOCK
    return _is_here(gate) and not (is_wide and ligers().swiglu._should_tile(width))


class SwiGLU(torch.autograd.Function):
    """``silu(gate) * up``; backward writes the gradients over both."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        """Return the product, and keep its factors."""
        width = gate.shape[-1]
        gate = gate.contiguous()
        product = torch.empty_like(gate)
        gate_ND, up_ND = gate.view(-1, width), up.contiguous().view(-1, width)
        block, warps = _settings(width)
        ligers().swiglu._swiglu_forward_kernel[(len(gate_ND),)](
            gate_ND,
            up_ND,
            product.view(-1, width),
            width,
            1.0,
            n_cols=width,
            BLOCK_SIZE=block,
            num_warps=warps,
        )
        ctx.save_for_backward(gate_ND, up_ND)
        return product

    @staticmethod
    def backward(ctx: Any, d_product: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients of both factors."""
        gate_ND, up_ND = ctx.saved_tensors
        shape = d_product.shape
        width = shape[-1]
        block, warps = _settings(width)
        ligers().swiglu._swiglu_backward_kernel[(len(gate_ND),)](
            d_product.contiguous().view(-1, width),
            gate_ND,
            up_ND,
            width,
            1.0,
            n_cols=width,
            BLOCK_SIZE=block,
            num_warps=warps,
        )
        return gate_ND.view(shape), up_ND.view(shape)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        eps: float,
        offset: float,
        casting_mode: str,
        in_place: bool,
        row_mode: bool | None,
    ) -> Tensor:
        width = x.shape[-1]
        x, weight_D = x.contiguous(), weight.contiguous()
        assert weight_D.shape == (width,)
        mode = ligers().rms_norm._str_to_casting_mode[casting_mode]
        y = torch.empty_like(x)  # an output that is a view costs autograd more
        x_ND, y_ND = x.view(-1, width), y.view(-1, width)
        rstd_N = torch.empty(
            len(x_ND), dtype=x.dtype if casting_mode == "none" else torch.float32, device=x.device
        )
        block, warps = _settings(width)
        tensors = y_ND, width, x_ND, width, weight_D, 1, rstd_N, 1
        numbers = eps, offset, mode
        settings = {"elementwise_affine": True, "BLOCK_SIZE": block, "num_warps": warps}
        by_row = bool(block > _FEW_COLUMNS or len(x_ND) < _MANY_ROWS or row_mode)
        if by_row:
            ligers().rms_norm._rms_norm_forward_kernel[(len(x_ND),)](*tensors, width, *numbers, **settings)
        else:
            grid = (-(-len(x_ND) // _ROWS_OF_A_BLOCK),)
            ligers().rms_norm._block_rms_norm_forward_kernel[grid](
                *tensors, len(x_ND), width, *numbers, BLOCK_ROW=_ROWS_OF_A_BLOCK, **settings
            )
        ctx.save_for_backward(x_ND, weight_D, rstd_N)
        ctx.call = offset, mode, in_place, by_row
        return y

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_ND, weight_D, rstd_N = ctx.saved_tensors
        offset, mode, in_place, by_row = ctx.call
        num_rows, width = x_ND.shape
        d_y_ND = d_y.contiguous().view(-1, width)
        d_x_ND = d_y_ND if in_place is True else torch.empty_like(d_y_ND)
        programs, has_weight = _num_programs(x_ND.device), ctx.needs_input_grad[1]
        shares = torch.empty(programs, width, dtype=torch.float32, device=x_ND.device) if has_weight else None
        block, warps = _settings(width)
        tensors = (
            d_y_ND,
            width,
            d_x_ND,
            width,
            x_ND,
            width,
            ligers().rms_norm.torch_to_triton_dtype[x_ND.dtype],
        )
        sums = weight_D, 1, rstd_N, 1, shares, width if has_weight else 0, num_rows, width, offset
        settings = {
            "elementwise_affine": True,
            "BLOCK_SIZE": block,
            "COMPUTE_DW": has_weight,
            "num_warps": warps,
        }
        if by_row:
            rows = -(-num_rows // programs)
            ligers().rms_norm._rms_norm_backward_kernel[(programs,)](*tensors, *sums, rows, mode, **settings)
        else:
            ligers().rms_norm._block_rms_norm_backward_kernel[(programs,)](
                *tensors, *sums, mode, BLOCK_ROW=_ROWS_OF_A_BLOCK, **settings
            )
        d_weight = None if shares is None else shares.sum(dim=0).to(weight_D.dtype)
        return d_x_ND.view(d_y.shape), d_weight, None, None, None, None, None


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return _turned(query, key, cos, sin, is_backward=False)

    @staticmethod
    def backward(ctx: Any, d_query: Tensor, d_key: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return *_turned(d_query, d_key, *ctx.saved_tensors, is_backward=True), None, None


def _turned(
    query_BHTD: Tensor, key_BHTD: Tensor, cos: Tensor, sin: Tensor, *, is_backward: bool
) -> tuple[Tensor, Tensor]:
    query, key = query_BHTD.transpose(1, 2).contiguous(), key_BHTD.transpose(1, 2).contiguous()
    rows, tokens, num, size = query.shape
    num_keys, turned = key.shape[2], min(cos.shape[-1], size)
    padded = _power_of_2(num), _power_of_2(num_keys)
    ligers().rope._triton_rope[(rows * tokens,)](
        query,
        num * size,
        key,
        num_keys * size,
        cos,
        cos.shape[-1],
        sin,
        sin.shape[-1],
        tokens,
        rows,
        len(cos),
        num,
        num_keys,
        size,
        *padded,
        _power_of_2(size),
        _power_of_2(turned),
        turned,
        BLOCK_SIZE=max(padded),
        BACKWARD_PASS=is_backward,
    )
    return query.transpose(1, 2), key.transpose(1, 2)


def _is_here(tensor: Tensor) -> bool:
    """Return whether Triton launches on a tensor's device as it is."""
    device = tensor.device
    is_current = device.type != "cuda" or device.index == torch.cuda.current_device()
    return is_current and not is_sharded(tensor)


@functools.cache
def _settings(width: int) -> tuple[int, int]:
    """Return the numbers that a program takes at once, and its warps."""
    return ligers().rms_norm.calculate_settings(width)


def _power_of_2(number: int) -> int:
    """Return the least one that is not smaller."""
    return 1 << (number - 1).bit_length()


def _num_programs(device: torch.device) -> int:
    """Return how many programs share the rows of a norm in backward: one a multiprocessor."""
    if device.type == "cuda":
        return _num_multiprocessors(device.index)
    if kernels_of(device) != "cuda":
        return 1
    return torch.get_device_module(device).get_device_properties(device).multi_processor_count


@functools.cache
def _num_multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count
