"""Liger's kernels line by line in torch, launched in place of Triton's on a CPU.

Liger's own functions call them with what they would launch the kernels with: grids, strides, which gradient is
written over which tensor, and autograd are Liger's. What Triton computes for one row, these compute for all rows at
once, in the same types. Source: liger-kernel 0.8.5, ``ops/rms_norm.py``, ``swiglu.py``, ``geglu.py``, ``rope.py``.
``tests/techniques/kernels/test_liger_in_triton.py`` compares them with the kernels in Triton's interpreter.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
from collections import Counter
from unittest import mock

import torch

NONE, LLAMA, GEMMA = -1, 0, 1
SQRT_2_OVER_PI = 0.7978845608028654


def _rms_norm_forward(given, grid):
    x, weight, mode = given["X_ptr"], given["W_ptr"], given["casting_mode"]
    dtype = x.dtype
    if mode == LLAMA:
        x = x.float()
    if mode == GEMMA:
        weight = weight.float()
        x = x.float()
    mean_square = (x * x).sum(-1) / given["n_cols"]
    rstd = torch.rsqrt(mean_square + given["eps"])
    given["RSTD_ptr"].copy_(rstd)
    x = x * rstd[:, None]
    if mode == LLAMA:
        x = x.to(dtype)
    # A scalar of Triton's is a float32 tensor in a product, not a weak number as in torch.
    y = x * (weight.float() + given["offset"])
    given["Y_ptr"].copy_(y)


def _rms_norm_backward(given, grid):
    d_y, x, mode = given["dY_ptr"].clone(), given["X_ptr"].float(), given["casting_mode"]
    dtype, rstd = given["X_ptr"].dtype, given["RSTD_ptr"][:, None]
    weight = given["W_ptr"].float() + given["offset"]
    if mode == GEMMA:
        d_y = d_y.float()
    m = (d_y * weight).float()
    d_x = rstd * m
    d_x = d_x + rstd * (-(1 / given["n_cols"]) * rstd * rstd * (m * x).sum(-1, keepdim=True) * x)
    if given["COMPUTE_DW"]:
        shares = d_y * (x * rstd).to(dtype) if mode == LLAMA else d_y * (x * rstd)
        (programs,) = grid
        rows = math.ceil(len(d_y) / programs)
        for program in range(programs):
            given["dW_ptr"][program] = shares[program * rows : (program + 1) * rows].float().sum(0)
    given["dX_ptr"].copy_(d_x)


def _swiglu_forward(given, grid):
    a, b = given["a_ptr"].float() * given["gate_multiplier"], given["b_ptr"]
    given["c_ptr"].copy_((a * torch.sigmoid(a)).to(b.dtype) * b)


def _swiglu_backward(given, grid):
    d_c, a, b = given["dc_ptr"], given["a_ptr"].float() * given["gate_multiplier"], given["b_ptr"].clone()
    sig_a = torch.sigmoid(a)
    silu_a = a * sig_a
    d_b = d_c * silu_a
    d_a = d_c * (silu_a * (1 - sig_a) + sig_a) * b * given["gate_multiplier"]
    given["a_ptr"].copy_(d_a)
    given["b_ptr"].copy_(d_b)


def _geglu_forward(given, grid):
    a, b = given["a"].float(), given["b"]
    tanh = torch.tanh(SQRT_2_OVER_PI * (a + 0.044715 * (a * a * a)))
    given["c"].copy_((0.5 * a * (1 + tanh)).to(b.dtype) * b)


def _geglu_backward(given, grid):
    d_c, a, b = given["dc"], given["a"].float(), given["b"].clone()
    tanh = torch.tanh(SQRT_2_OVER_PI * (a + 0.044715 * (a * a * a)))
    geglu_a = (0.5 * a * (1 + tanh)).to(d_c.dtype).float()
    d_b = d_c.float() * geglu_a
    term1 = 0.5 * (1 + tanh)
    term2 = 0.5 * a * (1 - tanh * tanh) * (SQRT_2_OVER_PI * (1 + 3 * 0.044715 * a * a))
    given["a"].copy_(d_c * b * (term1 + term2))
    given["b"].copy_(d_b.to(d_c.dtype))


def _rope(given, grid):
    half = given["rd"] // 2
    cos, sin = (given[name][..., :half].unsqueeze(2) for name in ("cos", "sin"))
    if given["BACKWARD_PASS"]:
        sin = -sin
    for name in ("q_ptr", "k_ptr"):
        whole_BTHD = given[name]
        first, second = whole_BTHD[..., :half], whole_BTHD[..., half : 2 * half]
        one, other = first.to(sin.dtype), second.to(sin.dtype)
        turned = one * cos - other * sin, other * cos + one * sin
        first.copy_(turned[0])
        second.copy_(turned[1])


TRANSCRIPTIONS = {
    "_rms_norm_forward_kernel": _rms_norm_forward,
    "_block_rms_norm_forward_kernel": _rms_norm_forward,
    "_rms_norm_backward_kernel": _rms_norm_backward,
    "_block_rms_norm_backward_kernel": _rms_norm_backward,
    "_swiglu_forward_kernel": _swiglu_forward,
    "_swiglu_backward_kernel": _swiglu_backward,
    "_geglu_tanh_forward_kernel": _geglu_forward,
    "_geglu_tanh_backward_kernel": _geglu_backward,
    "_triton_rope": _rope,
}


LAUNCHES: Counter[str] = Counter()
"""How often each kernel was launched since the counter was cleared."""


def launch(kernel, *args, grid, warmup=False, **kwargs):
    """Run the transcription of a kernel with the arguments of its launch."""
    parameters = inspect.signature(kernel.fn).parameters
    bound = inspect.signature(kernel.fn).bind(
        *args, **{name: value for name, value in kwargs.items() if name in parameters}
    )
    bound.apply_defaults()
    name = kernel.fn.__name__
    LAUNCHES[name] += 1
    given = bound.arguments
    if (
        name != "_triton_rope"
    ):  # the others get addresses and widths: whatever is in front of the last axis is rows
        given = {
            key: _rows(value) if isinstance(value, torch.Tensor) else value for key, value in given.items()
        }
    with torch.no_grad():
        TRANSCRIPTIONS[name](given, grid)


def _rows(tensor):
    return tensor.view(-1, tensor.shape[-1]) if tensor.dim() > 2 else tensor


@contextlib.contextmanager
def transcribed_kernels():
    """Let Liger's functions launch the transcriptions, and Liger's kernels be taken on a CPU."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    with (
        mock.patch.dict(os.environ, TRITON_INTERPRET="1"),
        mock.patch.object(JITFunction, "run", launch),
        mock.patch.object(InterpretedFunction, "run", launch),
    ):
        yield
