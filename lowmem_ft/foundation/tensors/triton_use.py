"""Check whether a Triton kernel of ours works on a device: a trial, once for each format."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import logging
import os
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lowmem_ft.foundation.devices import compute_capability, is_virtual, kernels_of
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.out_of_memory_errors import is_failed_allocation
from lowmem_ft.foundation.packages import is_installed, triton_lacks

logger = logging.getLogger(__name__)

Kernel = Literal["auto", "eager", "triton", "untried"]
"""Ways to compute that may be requested; ``untried`` is Triton without a trial, as in the trial itself."""

Trial = Callable[[Kernel], Mapping[str, Tensor]]
"""Function that computes something small with a kernel, and returns the results in float32."""

_OLDEST = (8, 0)
"""Oldest compute capability: the kernels are compiled and their registers are counted for Ampere and later."""


@dataclass(frozen=True)
class Work:
    """The words for what a kernel does.

    Args:
        name: its name, such as ``update``.
        without: a clause that says how it is done otherwise.
    """

    name: str
    without: str


_works: dict[Hashable, bool] = {}
_told: set[tuple[Work, str]] = set()
_says_of_virtual = contextvars.ContextVar("_says_of_virtual", default=False)


def uses_kernel(work: Work, kernel: Kernel, device: torch.device, formats: Hashable, trial: Trial) -> bool:
    """Return whether to compute with the kernel rather than operation by operation.

    Args:
        work: what it does.
        kernel: ``auto`` takes it on CUDA if it is available and agrees with the operations; ``triton`` requires it.
        device: the device to compute on.
        formats: everything that the kernel is compiled for.
        trial: run twice for new formats; on a virtual GPU, which computes nothing, agreement is assumed.

    Raises:
        UserError: if the kernel is required and does not work.
        RuntimeError: if the trial runs out of memory; it is repeated the next time.
    """
    if kernel == "eager" or (kernel == "auto" and kernels_of(device) != "cuda"):
        return False
    if kernel == "untried":
        return True
    if is_virtual(device):  # one name for GPUs of all kinds, and no values to compare
        problem = _problem_of(device)
        if problem is not None and kernel == "auto" and _says_of_virtual.get():
            _tell(work, problem)
        return _works_or_refused(work, kernel, problem)
    key = (work, kernel, device, formats)
    if key not in _works:
        problem = _problem_of(device) or _problem_of_trial(trial)
        _works[key] = _works_or_refused(work, kernel, problem)
        if problem is not None and (work, problem) not in _told:
            _told.add((work, problem))
            _tell(work, problem)
    return _works[key]


def may_use_kernel(kernel: Kernel, device: torch.device) -> bool:
    """Return whether :func:`uses_kernel` may be true on a device, for some formats and without a trial."""
    if kernel == "eager" or (kernel == "auto" and kernels_of(device) != "cuda"):
        return False
    return kernel == "untried" or _problem_of(device) is None


def launching_on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Enter a device: Triton launches on the current one, wherever its tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@contextlib.contextmanager
def said_of_virtual_gpus() -> Iterator[None]:
    """Warn each time that a virtual GPU lacks a kernel, within the block, as a run would once; outside it, never."""
    before = _says_of_virtual.set(True)
    try:
        yield
    finally:
        _says_of_virtual.reset(before)


def _tell(work: Work, problem: str) -> None:
    logger.warning("%s, which takes longer than one Triton kernel: %s", work.without, problem)


def _works_or_refused(work: Work, kernel: Kernel, problem: str | None) -> bool:
    if problem is not None and kernel == "triton":
        raise UserError(f"The Triton {work.name} was requested, but {problem} Set kernel to auto or eager.")
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
    """Return what Triton lacks on this machine, or on the machine of a virtual GPU."""
    if not is_virtual(device):
        return triton_lacks()
    if torch.get_device_module(device).has_triton():
        return None
    return triton_lacks() or "Triton is not installed on that machine. `pip install triton` installs it."


def _tried(trial: Trial) -> Mapping[str, Tensor]:
    """Run the trial with the kernel, and once more if memory has run out.

    A kernel is loaded outside torch's allocator, which may hold all free memory: that is released. The trial comes
    before the first weight changes, in an update that cannot start over; what follows runs the kernel that it loaded.
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
    except Exception as error:  # a compiler, a driver and a cache folder are involved
        if is_failed_allocation(error):
            raise  # this is no evidence about the kernel
        text = str(error).strip().splitlines()
        return (
            f"its kernel does not run here ({type(error).__name__}: {text[0] if text else 'no message'}). Run `pip "
            "install` with the version of Triton that belongs to this torch; it also needs gcc, and a folder to write "
            "to (TRITON_CACHE_DIR)."
        )
    for name, value in expected.items():
        off = (found[name] - value).abs()
        is_near = (off <= value.abs() * 2**-12).double().mean().item() >= 0.99
        # No value may be off by more than the coarsest format rounds, an eighth and the block's floor.
        if not is_near or not bool((off <= value.abs() / 4 + value.abs().max() * 2**-14).all()):
            return f"its kernel computes a different {name} from torch's operations. Please report it."
    return None
