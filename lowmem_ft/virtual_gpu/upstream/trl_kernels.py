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
from lowmem_ft.upstream.import_hooks import when_imported, wrap_when_imported
from lowmem_ft.upstream.patches import existing, replace, wrap
from lowmem_ft.upstream.tested import is_before
from lowmem_ft.virtual_gpu.recording.operator_costs import register_operator_cost

_KERNELS = {
    "trl.kernels.chunked_logprob": ("_forward_kernel", "_backward_kernel"),
    "trl.kernels.chunked_divergence": ("_stats_kernel", "_jsd_kernel", "_backward_kernel"),
}
_ASKS = (*_KERNELS, "trl.trainer.utils", "trl.trainer.distillation_trainer")
"""Modules that check whether a device has Triton."""

_WRITES = "_backward_kernel"
"""Kernel that overwrites the logits with their gradient."""


def trl_kernels_as_on_cuda(undo: contextlib.ExitStack) -> None:
    """Let TRL's heads use Triton on the virtual device until a stack is undone, whether imported before or later."""
    if is_before("trl", (1, 16)):
        return
    _register_cost()
    for name in _ASKS:
        wrap_when_imported(undo, name, "", "_use_triton", _use_triton)
    for name, kernels in _KERNELS.items():
        when_imported(undo, name, functools.partial(_adapt, undo, kernels))


def _use_triton(use_triton: Callable[[torch.device], bool], device: torch.device) -> bool:
    return is_virtual(device) or use_triton(device)


def _adapt(undo: contextlib.ExitStack, kernels: tuple[str, ...], module: Any) -> None:
    for name in kernels:
        replace(undo, module, name, _Launcher(existing(module, name), writes=name == _WRITES))
    if existing(module, "_MM_OUT_DTYPE"):
        wrap(undo, module, "_addmm_fp32", _addmm_fp32)
    if not hasattr(module, "triton"):  # it is not installed here
        module.triton = SimpleNamespace(cdiv=lambda number, size: -(-number // size))
        undo.callback(delattr, module, "triton")


def _addmm_fp32(multiply: Callable[..., None], acc: Tensor, a: Tensor, b: Tensor) -> None:
    if is_virtual(acc.device) and a.dtype in (torch.float16, torch.bfloat16):
        torch.addmm(acc, a, b, out_dtype=torch.float32, out=acc)
    else:
        multiply(acc, a, b)


class _Launcher:
    """Stands for a Triton kernel: on virtual tensors, one pass over its tiles; on others, the kernel itself.

    Args:
        kernel: one of TRL's kernels.
        writes: whether it writes the first tile, too.
    """

    def __init__(self, kernel: Any, *, writes: bool) -> None:
        self._kernel = kernel
        self._passes = 2 if writes else 1

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            tiles = [arg for arg in args if isinstance(arg, Tensor) and arg.dim() == 2]
            if is_virtual(tiles[0].device):
                torch.ops.lowmem_ft.trl_kernel(tiles[0], tiles[1:], self._passes)
            else:
                self._kernel[grid](*args, **kwargs)

        return launch


@torch.library.custom_op("lowmem_ft::trl_kernel", mutates_args=("tile_TV",))
def _kernel(tile_TV: Tensor, others: list[Tensor], passes: int) -> None:
    raise NotImplementedError("It replaces a Triton kernel on a virtual GPU, and computes nothing.")


@_kernel.register_fake
def _makes_nothing(tile_TV: Tensor, others: list[Tensor], passes: int) -> None:
    """Return nothing: the kernel writes the tile itself."""


@functools.cache
def _register_cost() -> None:
    register_operator_cost(torch.ops.lowmem_ft.trl_kernel.default, moved_bytes=_moved_bytes, irrelevant=())


def _moved_bytes(tile_TV: Tensor, others: list[Tensor], passes: int) -> int:
    return passes * tile_TV.nbytes + sum(tile.nbytes for tile in others)
