"""Enforcement of the budget: as the allocator's limit, or by comparisons before, during and after a run."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch

from lowmem_ft.foundation.budget import Budget, is_of_size
from lowmem_ft.foundation.catalog.context_overhead import allocator_cap, process_overhead_bytes
from lowmem_ft.foundation.catalog.this_machine import this_machines_gpu
from lowmem_ft.foundation.errors import DoesNotFitError, UserError
from lowmem_ft.foundation.system.device_memory import read_device_memory
from lowmem_ft.foundation.system.host_limits import HostLimit, tightest_host_limit
from lowmem_ft.foundation.system.host_memory import read_host_memory, resident_file_bytes
from lowmem_ft.foundation.units import MIB, format_bytes, parse_bytes

logger = logging.getLogger(__name__)

LOW_BYTES = 256 * MIB
"""Free host memory in bytes, after the spare share (``foundation/system/host_limits.py``), below which a warning is
logged: one step may take that much without notice."""


class Host:
    """Readings of the host memory of a run's process: this one; a rehearsal overrides them."""

    def held_bytes(self) -> int:
        """Return the bytes held now, without pages of files; see ``foundation/system/host_memory.py``."""
        return read_host_memory().now_bytes

    def peak_bytes(self, file_bytes: int) -> int:
        """Return the most bytes that the process has held, without ``file_bytes`` of files in ``offload.folder``.

        Their pages that were resident at the peak and have been dropped since do not count.
        """
        dropped_bytes, memory = max(0, file_bytes - resident_file_bytes()), read_host_memory()
        return max(memory.now_bytes, memory.peak_bytes - dropped_bytes)

    def limit(self, file_bytes: int) -> HostLimit | None:
        """Return the host memory that the machine or the container has left, ignoring those files; None: no limit."""
        return tightest_host_limit(None, file_bytes=file_bytes)


THIS_HOST = Host()


def apply_budget(
    budget: Budget,
    device: torch.device,
    *,
    host: Host = THIS_HOST,
    uses_bitsandbytes: bool = False,
    num_processes: int = 1,
    num_processes_here: int = 1,
) -> None:
    """Cap torch's caching allocator so that the process stays within ``budget.device``, as it would on such a GPU.

    Limits: memory outside the allocator (CUDA context, NCCL, bitsandbytes) cannot be capped, so that its size in the
    catalogue is deducted. Host memory, including that of a run on a CPU, has no allocator to cap: the process must be
    within its budget before the model is loaded; :class:`BudgetWatch` does the rest.

    Args:
        budget: the budget to enforce.
        device: the device of the run.
        host: readings of the host's memory.
        uses_bitsandbytes: whether the run calls bitsandbytes' kernels.
        num_processes: processes of the run, each with a GPU.
        num_processes_here: processes on this machine, which share its host.

    Raises:
        UserError: if the device has less memory than the budget.
        DoesNotFitError: if the process already holds more than a budget allows, on the host or outside the allocator.
    """
    now_bytes = host.held_bytes()
    for limit in _limits_of_host(budget, device, num_processes_here):
        if now_bytes > limit.num_bytes and budget.enforce:
            raise DoesNotFitError(
                f"{limit.words} is less than this process holds before the model is loaded, {format_bytes(now_bytes)} "
                "for the libraries alone. Raise it, or leave it out."
            )
    if budget.device is None or device.type != "cuda":
        return
    num_bytes, total = parse_bytes(budget.device), torch.cuda.get_device_properties(device).total_memory
    if not is_of_size(total, num_bytes):
        raise UserError(
            f"budget.device={budget.device} is more than this device has ({format_bytes(total)}). "
            "Lower it, or leave it out."
        )
    _warn_of_others(budget.device, device, total)
    if not budget.enforce:
        return
    gpu = this_machines_gpu(device)
    overhead = process_overhead_bytes(gpu, uses_bitsandbytes=uses_bitsandbytes, num_processes=num_processes)
    cap = allocator_cap(num_bytes, overhead)
    parts = ", ".join(f"{part} {format_bytes(size)}" for part, size in overhead.items())
    if cap <= 0:
        raise DoesNotFitError(
            f"budget.device={budget.device} leaves nothing for tensors: a process takes {parts} of this device in "
            "addition to them. Raise it."
        )
    torch.cuda.empty_cache()  # memory cached before would be handed out in addition to the budget
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total), device)
    logger.info(
        "The allocator is capped at %s: budget.device=%s minus %s.", format_bytes(cap), budget.device, parts
    )


def _warn_of_others(wanted: str, device: torch.device, total: int) -> None:
    """Warn if other processes leave less of a device than the budget."""
    available = this_machines_gpu(device).available_bytes
    if available < min(parse_bytes(wanted), total):
        logger.warning(
            "Other processes hold %s of this device's %s: only %s of budget.device=%s are available. End them "
            "(nvidia-smi lists them), or lower the budget to what is free.",
            format_bytes(total - available),
            format_bytes(total),
            format_bytes(available),
            wanted,
        )


def lift_cap(budget: Budget) -> None:
    """Undo :func:`apply_budget` on the current device, so that the cap does not outlive the run in this process."""
    if budget.device is not None and budget.enforce and torch.cuda.is_initialized():
        torch.cuda.set_per_process_memory_fraction(1.0)


class BudgetWatch:
    """Comparison of memory with its budgets: after each step that of the host, which :func:`apply_budget` cannot cap.

    A run on a CPU that is above ``budget.device`` after its first step ends, as it would on a device of that size. If
    memory grows beyond a budget later, a warning is logged at once and the run continues, since there is memory after
    all.

    Args:
        budget: the budget of the run.
        device: the device of the run.
        num_processes: processes on this machine, which share its host.
        host: readings of the host's memory.
    """

    def __init__(
        self, budget: Budget, device: torch.device, num_processes: int = 1, host: Host = THIS_HOST
    ) -> None:
        self._host = host
        self._budget = budget
        self._device = device
        self._num_processes = num_processes
        self._limits = _limits_of_host(budget, device, num_processes)
        self._is_first = True
        self._has_warned_of_machine = False

    def after_step(self, *, file_bytes: int = 0) -> None:
        """Compare the process's peak with its budgets.

        Args:
            file_bytes: peak bytes in files of ``offload.folder``.

        Raises:
            DoesNotFitError: if the first step took a process on a CPU beyond ``budget.device``.
        """
        self._warn_of_machine(file_bytes)
        peak_bytes = self._host.peak_bytes(file_bytes) if self._limits else 0
        for limit in list(self._limits):
            if peak_bytes <= limit.num_bytes:
                continue
            if self._is_first and self._budget.enforce and limit.of_device:
                raise DoesNotFitError(
                    f"{limit.words} is less than this process took for one step, {format_bytes(peak_bytes)}. Raise it; "
                    "or set budget.enforce=false to continue with only a warning."
                )
            logger.warning("Host memory has grown to %s, above %s.", format_bytes(peak_bytes), limit.words)
            self._limits.remove(limit)
        self._is_first = False

    def report(self, *, file_bytes: int = 0) -> None:
        """Log the measured peaks with the budgets that there are; on a CPU, device memory is host memory.

        Args:
            file_bytes: peak bytes in files of ``offload.folder``: they count for no budget, as the system reclaims
                their pages when memory is short.
        """
        budget, device = self._budget, self._device
        on_host = self._host.peak_bytes(file_bytes)
        in_words = budget.host_in_words(self._num_processes)
        peaks = [("host", budget.host_bytes(self._num_processes), in_words, on_host)]
        if device.type == "cuda" or budget.device is not None:
            limit_bytes = None if budget.device is None else parse_bytes(budget.device)
            peak_bytes = read_device_memory(device).peak_bytes if device.type == "cuda" else on_host
            peaks.insert(0, ("device", limit_bytes, f"budget.device={budget.device}", peak_bytes))
        for name, limit_bytes, words, peak_bytes in peaks:
            peak = format_bytes(peak_bytes)
            if limit_bytes is None:
                continue  # the report of the run has it
            if peak_bytes > limit_bytes:
                logger.warning("Peak %s memory: %s, above %s.", name, peak, words)
            else:
                logger.info("Peak %s memory: %s, within %s.", name, peak, words)

    def _warn_of_machine(self, file_bytes: int) -> None:
        """Warn once if the machine or the container is about to run out of memory: the system then kills silently."""
        limit = self._host.limit(file_bytes)
        if limit is None or limit.available_bytes > LOW_BYTES or self._has_warned_of_machine:
            return
        self._has_warned_of_machine = True
        logger.warning(
            "Host memory is nearly used up: %s. The system may kill this process, but its last checkpoint is safe. "
            "End other programs, or use offload.folder.",
            limit.source,
        )


class _Limit(NamedTuple):
    """A budget that a process's host memory counts for, and whether it is that of the device, on a CPU."""

    words: str
    num_bytes: int
    of_device: bool


def _limits_of_host(budget: Budget, device: torch.device, num_processes: int) -> list[_Limit]:
    """Return the budgets that host memory counts for; on a CPU, device memory counts, too."""
    limits = []
    if budget.device is not None and device.type == "cpu":
        limits.append(_Limit(f"budget.device={budget.device}", parse_bytes(budget.device), of_device=True))
    host_bytes = budget.host_bytes(num_processes)
    if host_bytes is not None:
        limits.append(_Limit(budget.host_in_words(num_processes), host_bytes, of_device=False))
    return limits
