"""TRL's heads on the virtual GPU, as its Triton kernels compute them: each tile of logits read and written in place.

Without Triton, or on a device not named ``cuda``, TRL computes the same steps in torch: half a dozen float32
copies of a tile, and a score for every position. A GPU under Linux, where torch includes Triton, never runs those.
Before 1.16, TRL does not ask that, and its heads are traced in torch: as TRL 1.14 computes them on a GPU, too.
Sources: TRL 1.16.0, ``kernels/chunked_logprob.py``, ``kernels/chunked_divergence.py``, ``trainer/utils.py``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lowmem_ft.foundation.devices import is_virtual
from lowmem_ft.foundation.upstream.import_hooks import when_imported, wrap_when_imported
from lowmem_ft.foundation.upstream.patches import existing, replace, wrap
from lowmem_ft.foundation.upstream.tested import is_before
from lowmem_ft.virtual_gpu.triton.triton_stand_in import Kernel, cdiv

_KERNELS = {
    "trl.kernels.chunked_logprob": ("_forward_kernel", "_backward_kernel"),
    "trl.kernels.chunked_divergence": ("_stats_kernel", "_jsd_kernel", "_backward_kernel"),
}
_ASKS = (*_KERNELS, "trl.trainer.utils", "trl.trainer.distillation_trainer")
"""Modules that check whether a device has Triton."""


def trl_kernels_as_on_cuda(undo: contextlib.ExitStack) -> None:
    """Let TRL's heads use Triton on the virtual device until a stack is undone, whether imported before or later."""
    if is_before("trl", (1, 16)):
        return
    for name in _ASKS:
        wrap_when_imported(undo, name, "", "_use_triton", _use_triton)
    for name, kernels in _KERNELS.items():
        when_imported(undo, name, functools.partial(_adapt, undo, kernels))


def _use_triton(use_triton: Callable[[torch.device], bool], device: torch.device) -> bool:
    return is_virtual(device) or use_triton(device)


def _adapt(undo: contextlib.ExitStack, kernels: tuple[str, ...], module: Any) -> None:
    if existing(module, "_MM_OUT_DTYPE"):
        wrap(undo, module, "_addmm_fp32", _addmm_fp32)
    if not hasattr(module, "triton"):  # it is not installed here, and the kernels are plain functions
        for name in kernels:
            replace(undo, module, name, Kernel(existing(module, name)))
        module.triton = SimpleNamespace(cdiv=cdiv)
        undo.callback(delattr, module, "triton")


def _addmm_fp32(multiply: Callable[..., None], acc: Tensor, a: Tensor, b: Tensor) -> None:
    if is_virtual(acc.device) and a.dtype in (torch.float16, torch.bfloat16):
        torch.addmm(acc, a, b, out_dtype=torch.float32, out=acc)
    else:
        multiply(acc, a, b)
