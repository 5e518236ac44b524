"""Fake rules for operators of torch that have none, or whose steps depend on the device being CUDA."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d

from lowmem_ft.virtual_gpu.kernels import cudnn_operators

aten = torch.ops.aten

_IN_PLACE = ("_fused_sgd_", "_fused_sgd_.tensor_lr", "_fused_adagrad_", "_fused_adagrad_.tensor_lr")
"""Optimizer steps in one kernel, which write into their arguments and return nothing."""

_ONE_KERNEL = ("silu_backward",)
"""Kernels of CUDA that torch replaces by several, with memory between them, on a device without that kernel."""

_COALESCED_SUM = "allreduce_coalesced_"
"""The sums of several tensors in one collective, alone of those that are used here without a rule."""

_library = torch.library.Library("aten", "IMPL")
_collectives = torch.library.Library("c10d", "IMPL")


_GRU_WORKSPACE, _GRU_GATES = 5, 3
"""Values that the fused cell keeps for backward, and its gates, by element of the hidden state.

Source: pytorch, aten/src/ATen/native/cuda/RNN.cu.
"""


def register_fake_rules() -> None:
    """Register the missing rules with torch, once per process."""
    for name, rule in _RULES.items():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
            _library.impl(name, rule, "Meta")
    for name in _IN_PLACE:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
            _library.impl(name, _nothing, "Meta")
    _library.impl("_cudnn_rnn", cudnn_operators.recurrent_layers, "Meta")
    for name in _ONE_KERNEL:
        _library.impl(name, _like_first, "PrivateUse1")
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{_COALESCED_SUM}", "Meta"):
        _collectives.impl(_COALESCED_SUM, _done, "Meta")
    _library.impl("softmax.int", functools.partial(_softmax, aten._softmax), "AutogradPrivateUse1")
    _library.impl("log_softmax.int", functools.partial(_softmax, aten._log_softmax), "AutogradPrivateUse1")


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _done(*args: Any, **kwargs: Any) -> Any:
    """Return the work of a collective without peers, which has ended."""
    return _distributed_c10d.FakeWork().boxed()


def _like_first(tensor: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(tensor)


def _softmax(kernel: Any, tensor: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Cast as CUDA does: its kernel turns float16 into float32 itself; in other cases a cast copy comes first.

    Source: pytorch, aten/src/ATen/native/SoftMax.cpp.
    """
    if tensor.dtype == torch.float16 and dtype == torch.float32:
        return kernel(tensor, dim, True)
    return kernel(tensor if dtype is None else tensor.to(dtype), dim, False)


def _gru_cell(input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, *biases: Any) -> tuple[Tensor, Tensor]:
    workspace = hx.new_empty((hx.shape[0], _GRU_WORKSPACE * hx.shape[1]))
    return torch.empty_like(hx, memory_format=torch.contiguous_format), workspace


def _gru_cell_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    width = _GRU_GATES * workspace.shape[1] // _GRU_WORKSPACE
    gates = [workspace.new_empty((workspace.shape[0], width)) for _ in range(2)]
    biases = [workspace.new_empty((width,)) if has_bias else None for _ in range(2)]
    return (*gates, torch.empty_like(grad_hy), *biases)


def _margin_loss(
    scores: Tensor, target: Tensor, p: Any = 1, margin: Any = 1, weight: Any = None, reduction: int = 1
) -> Tensor:
    """Return a loss for each row, or one for all; see aten/src/ATen/native/cuda/MultiMarginLoss.cu."""
    return scores.new_empty(scores.shape[:1] if reduction == 0 and scores.dim() > 1 else ())


def _multilabel_margin_loss(scores: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """Return the loss, and which classes are targets; see aten/src/ATen/native/cuda/MultiLabelMarginCriterion.cu."""
    return _margin_loss(scores, target, reduction=reduction), scores.new_empty(target.shape)


def _like_second(gradient: Tensor, scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.empty_like(scores)


_RULES: dict[str, Any] = {
    "_cudnn_rnn_backward": cudnn_operators.recurrent_layers_backward,
    "_cudnn_ctc_loss": cudnn_operators.ctc_loss,
    "_standard_gamma_grad": _like_first,
    "_sample_dirichlet": _like_first,
    "_dirichlet_grad": _like_first,
    "fractional_max_pool3d_backward": _like_second,
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
    "_ctc_loss_backward": _like_second,
    "multi_margin_loss": _margin_loss,
    "multi_margin_loss_backward": _like_second,
    "multilabel_margin_loss_forward": _multilabel_margin_loss,
    "multilabel_margin_loss_backward": _like_second,
}
"""Rules by operator, where torch has none."""
