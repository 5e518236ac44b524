"""Autograd functions around Liger's kernels that spend less of the host's time at each launch than Liger's own.

Liger enters a device's context, asks for settings and loops over all arguments at each call, which takes longer than a
launch. These launch the same kernels with the same arguments, so that all bits are equal, and leave to Liger what is
rare: a device that is not the current one, ``DTensor``, tiles of wide rows, angles of other shapes. What a launch takes
in addition to its tensors is decided once for rows of one number and width, and Triton looks for the variant once.
Where a norm's gradient gets memory of its own, that is not filled with zeros first; the kernel writes all of it.

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
from lowmem_ft.foundation.tensors.prepared_launch import PreparedLaunch

VERSION = "0.8.5"
"""The release whose kernels these launch; with another, Liger's own functions do."""

_FEW_COLUMNS, _MANY_ROWS, _ROWS_OF_A_BLOCK = 256, 4096 * 8, 16
"""From so many rows on of at most so many numbers each, a program of a norm takes several."""

_MOST_LAUNCHES = 1024
"""Launches that are kept: rows of as many lengths, by the kinds of a model's modules."""

Launch = Callable[..., None]


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
        gate, up = gate.contiguous(), up.contiguous()
        product = torch.empty_like(gate)
        launch = _gating(gate.numel() // width, width, False, gate.device, gate.dtype, up.dtype)
        launch((gate, up), gate, up, product, width, 1.0)
        ctx.save_for_backward(gate, up)
        return product

    @staticmethod
    def backward(ctx: Any, d_product: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients of both factors."""
        gate, up = ctx.saved_tensors
        width = gate.shape[-1]
        d_product = d_product.contiguous()
        types = gate.dtype, up.dtype, d_product.dtype
        launch = _gating(gate.numel() // width, width, True, gate.device, types)
        launch((d_product, gate, up), d_product, gate, up, width, 1.0)
        return gate, up


@functools.lru_cache(_MOST_LAUNCHES)
def _gating(num_rows: int, width: int, is_backward: bool, *kinds: object) -> Launch:
    block, warps = _settings(width)
    own = ligers().swiglu
    kernel = own._swiglu_backward_kernel if is_backward else own._swiglu_forward_kernel
    return _launch(kernel, num_rows, {"n_cols": width, "BLOCK_SIZE": block, "num_warps": warps})


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
        num_rows = x.numel() // width
        y = torch.empty_like(x)  # an output that is a view costs autograd more
        rstd_N = torch.empty(
            num_rows, dtype=x.dtype if casting_mode == "none" else torch.float32, device=x.device
        )
        call = num_rows, width, offset, casting_mode, bool(row_mode)
        kinds = x.device, x.dtype, weight_D.dtype
        launch, numbers = _norming(*call, eps, *kinds)
        launch((x, weight_D), y, width, x, width, weight_D, 1, rstd_N, 1, *numbers)
        ctx.save_for_backward(x, weight_D, rstd_N)
        ctx.call, ctx.in_place = call, in_place
        return y

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight_D, rstd_N = ctx.saved_tensors
        d_y = d_y.contiguous()
        d_x = d_y if ctx.in_place is True else torch.empty_like(d_y)
        programs, has_weight = _num_programs(x.device), ctx.needs_input_grad[1]
        width, shares = x.shape[-1], None
        if has_weight:
            shares = torch.empty(programs, width, dtype=torch.float32, device=x.device)
        kinds = x.device, weight_D.dtype, d_y.dtype
        launch, of_x, numbers = _norming_backward(*ctx.call, programs, x.dtype, has_weight, *kinds)
        sums = weight_D, 1, rstd_N, 1, shares, width if has_weight else 0
        launch((d_y, x, weight_D), d_y, width, d_x, width, x, width, of_x, *sums, *numbers)
        d_weight = None if shares is None else shares.sum(dim=0).to(weight_D.dtype)
        return d_x, d_weight, None, None, None, None, None


@functools.lru_cache(_MOST_LAUNCHES)
def _norming(
    num_rows: int, width: int, offset: float, casting_mode: str, row_mode: bool, eps: float, *kinds: object
) -> tuple[Launch, tuple[Any, ...]]:
    """Return a norm's launch and the numbers that follow its tensors."""
    own = ligers().rms_norm
    block, warps = _settings(width)
    numbers = width, eps, offset, own._str_to_casting_mode[casting_mode]
    constants = {"elementwise_affine": True, "BLOCK_SIZE": block, "num_warps": warps}
    if _is_by_row(num_rows, block, row_mode):
        return _launch(own._rms_norm_forward_kernel, num_rows, constants), numbers
    num_blocks, constants = -(-num_rows // _ROWS_OF_A_BLOCK), {**constants, "BLOCK_ROW": _ROWS_OF_A_BLOCK}
    return _launch(own._block_rms_norm_forward_kernel, num_blocks, constants), (num_rows, *numbers)


@functools.lru_cache(_MOST_LAUNCHES)
def _norming_backward(
    num_rows: int,
    width: int,
    offset: float,
    casting_mode: str,
    row_mode: bool,
    programs: int,
    of_x: torch.dtype,
    has_weight: bool,
    *kinds: object,
) -> tuple[Launch, Any, tuple[Any, ...]]:
    """Return the launch of a norm's backward, Triton's type of its input, and the numbers that follow its tensors."""
    own = ligers().rms_norm
    block, warps = _settings(width)
    mode, numbers = own._str_to_casting_mode[casting_mode], (num_rows, width, offset)
    constants = {
        "elementwise_affine": True,
        "BLOCK_SIZE": block,
        "COMPUTE_DW": has_weight,
        "num_warps": warps,
    }
    if _is_by_row(num_rows, block, row_mode):
        kernel, numbers = own._rms_norm_backward_kernel, (*numbers, -(-num_rows // programs), mode)
    else:
        kernel, numbers = own._block_rms_norm_backward_kernel, (*numbers, mode)
        constants["BLOCK_ROW"] = _ROWS_OF_A_BLOCK
    return _launch(kernel, programs, constants), own.torch_to_triton_dtype[of_x], numbers


def _is_by_row(num_rows: int, block: int, row_mode: bool) -> bool:
    return block > _FEW_COLUMNS or num_rows < _MANY_ROWS or row_mode


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
    tensors = query, key, cos, sin
    num, num_keys, size = query.shape[2], key.shape[2], query.shape[3]
    of_cos, of_sin = cos.shape[-1], sin.shape[-1]
    types = query.dtype, key.dtype, cos.dtype, sin.dtype
    call = query.shape, num_keys, of_cos, of_sin, len(cos), is_backward, query.device, types
    launch, numbers = _turning(*call)
    launch(tensors, query, num * size, key, num_keys * size, cos, of_cos, sin, of_sin, *numbers)
    return query.transpose(1, 2), key.transpose(1, 2)


@functools.lru_cache(_MOST_LAUNCHES)
def _turning(
    shape: torch.Size,
    num_keys: int,
    of_cos: int,
    of_sin: int,
    rows_of_cos: int,
    is_backward: bool,
    *kinds: object,
) -> tuple[Launch, tuple[Any, ...]]:
    """Return the launch that turns queries and keys, and the numbers that follow its tensors."""
    rows, tokens, num, size = shape
    turned = min(of_cos, size)
    padded = _power_of_2(num), _power_of_2(num_keys)
    numbers = tokens, rows, rows_of_cos, num, num_keys, size, *padded, _power_of_2(size), _power_of_2(turned)
    constants = {"BLOCK_SIZE": max(padded), "BACKWARD_PASS": is_backward}
    kernel = ligers().rope._triton_rope
    return _launch(kernel, rows * tokens, constants), (*numbers, turned)


def _launch(kernel: Any, num_programs: int, options: dict[str, Any]) -> Launch:
    return functools.partial(PreparedLaunch(kernel, options).run, num_programs)


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
