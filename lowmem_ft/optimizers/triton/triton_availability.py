"""Whether the Triton kernel updates on a device: answered once for each format, by trying it there."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import logging
import os
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

from lowmem_ft.foundation.devices import compute_capability, is_virtual, kernels_of
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.out_of_memory_errors import is_failed_allocation
from lowmem_ft.foundation.packages import is_installed, triton_lacks

logger = logging.getLogger(__name__)

Kernel = Literal["auto", "eager", "triton", "untried"]
"""What an optimizer is told to update by; ``untried`` is the Triton kernel without a trial, as in the trial itself."""

Trial = Callable[[Kernel], Mapping[str, Tensor]]
"""Makes a few steps with a kernel and returns weights and averages after them, in float32."""

_OLDEST = (8, 0)
"""The kernel is compiled and its registers are counted for Ampere and later."""

_works: dict[Hashable, bool] = {}
_told: set[str] = set()
_says_of_virtual = contextvars.ContextVar("_says_of_virtual", default=False)


def uses_kernel(kernel: Kernel, device: torch.device, formats: Hashable, trial: Trial) -> bool:
    """Whether to update by the kernel rather than operation by operation.

    Args:
        kernel: ``auto`` takes it on CUDA where it is there and agrees with the operations; ``triton`` demands it.
        device: where the update runs.
        formats: everything that the kernel is compiled for.
        trial: run twice for new formats; a virtual GPU, which computes nothing, is taken to agree.

    Raises:
        UserError: if it is demanded and does not work.
        RuntimeError: if the trial runs out of memory; it is made again the next time.
    """
    if kernel == "eager" or (kernel == "auto" and kernels_of(device) != "cuda"):
        return False
    if kernel == "untried":
        return True
    if is_virtual(device):  # one name for GPUs of all kinds, and none that computes what could be compared
        problem = _problem_of(device)
        if problem is not None and kernel == "auto" and _says_of_virtual.get():
            _tell(problem)
        return _works_or_refused(kernel, problem)
    key = (kernel, device, formats)
    if key not in _works:
        problem = _problem_of(device) or _problem_of_trial(trial)
        _works[key] = _works_or_refused(kernel, problem)
        if problem is not None and problem not in _told:
            _told.add(problem)
            _tell(problem)
    return _works[key]


@contextlib.contextmanager
def said_of_virtual_gpus() -> Iterator[None]:
    """Within the block a virtual GPU without the kernel is warned of each time, as a run would be once; else never."""
    before = _says_of_virtual.set(True)
    try:
        yield
    finally:
        _says_of_virtual.reset(before)


def _tell(problem: str) -> None:
    logger.warning(
        "Weights are updated by many small kernels, which takes longer than one in Triton: %s", problem
    )


def _works_or_refused(kernel: Kernel, problem: str | None) -> bool:
    if problem is not None and kernel == "triton":
        raise UserError(f"The update by Triton was asked for, and {problem} Set kernel to auto or eager.")
    return problem is None


def _problem_of(device: torch.device) -> str | None:
    if kernels_of(device) == "cpu" and os.environ.get("TRITON_INTERPRET") == "1" and is_installed("triton"):
        return None
    if (lacks := _lacks(device)) is not None:
        return lacks
    is_nvidia = kernels_of(device) == "cuda" and (is_virtual(device) or torch.version.cuda is not None)
    if not is_nvidia:
        return f"it needs an NVIDIA GPU, got {device}."
    if compute_capability(device) < _OLDEST:
        name = f"cuda:{device.index or 0}" if is_virtual(device) else device
        return (
            f"it needs compute capability {_OLDEST[0]}.{_OLDEST[1]}, "
            f"{name} has {'.'.join(map(str, compute_capability(device)))}."
        )
    return None


def _lacks(device: torch.device) -> str | None:
    """What Triton lacks on this machine, or on the one that a virtual GPU is in."""
    if not is_virtual(device):
        return triton_lacks()
    if torch.get_device_module(device).has_triton():
        return None
    return triton_lacks() or "Triton is not installed there. `pip install triton` brings it."


def _tried(trial: Trial) -> Mapping[str, Tensor]:
    """What the kernel computes; once more where memory has run out.

    A kernel is loaded past torch's allocator, which may hold all that is free: that is given back. The trial comes
    before the first weight changes, in an update that cannot start over; real updates run the kernel it has loaded.
    """
    try:
        return trial("untried")
    except RuntimeError as error:
        if not is_failed_allocation(error):
            raise
    gc.collect()
    torch.cuda.empty_cache()
    return trial("untried")


def _problem_of_trial(trial: Trial) -> str | None:
    expected = trial("eager")
    try:
        found = _tried(trial)
    except Exception as error:  # a compiler, a driver and a cache folder are behind it
        if is_failed_allocation(error):
            raise  # which says nothing of the kernel
        text = str(error).strip().splitlines()
        return (
            f"its kernel does not run here ({type(error).__name__}: {text[0] if text else 'no message'}). "
            "`pip install` the version of Triton that belongs to torch's; it also needs gcc, and a folder to write to "
            "(TRITON_CACHE_DIR)."
        )
    for name, value in expected.items():
        off = (found[name] - value).abs()
        is_near = (off <= value.abs() * 2**-12).double().mean().item() >= 0.99
        # No value is off by more than the coarsest format rounds, an eighth and the block's floor.
        if not is_near or not bool((off <= value.abs() / 4 + value.abs().max() * 2**-14).all()):
            return f"its kernel computes another {name} than torch's operations do. Please report it."
    return None
