"""A run's measured memory and seconds, and its estimate, for its metrics, its model card and its report."""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lowmem_ft.foundation.catalog.timed_steps import keep_timed_step
from lowmem_ft.foundation.devices import name_of
from lowmem_ft.foundation.memory.comparison import (
    Peaks,
    Row,
    compared,
    estimated_peaks,
    peaks_in,
    typical_seconds,
)
from lowmem_ft.foundation.memory.cpu_step_time import TimedStep
from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.foundation.system.malloc import keep_few_kernels, keep_tensors_out_of_the_heap
from lowmem_ft.foundation.system.phase_peaks import PhasePeaks
from lowmem_ft.foundation.tensors.local_shards import local_part
from lowmem_ft.techniques.technique import Techniques
from lowmem_ft.training.callbacks.run_metrics import RunMetrics

LEAST_SHARE_OF_TOKENS = 0.5


class RunMemory:
    """The peaks of one process of a run, phase by phase.

    Args:
        device: the device of the run.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type == "cpu":
            keep_tensors_out_of_the_heap()  # as the estimate assumes
            keep_few_kernels()
        self._device = device
        self._began, self._earlier_seconds = time.monotonic(), 0.0
        self._peaks = PhasePeaks(device)
        self._by_category: dict[str, int] = {}
        self._step_seconds: list[float] = []
        self._timed: list[tuple[float, int]] = []
        self._has_stepped = False
        self.estimate: MemoryEstimate | None = None
        self._earlier: tuple[Peaks | None, Peaks] | None = None

    def continue_from(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Take from the same run's metrics the seconds up to its checkpoint, and earlier peaks if no step is left."""
        records = list(records)
        self._earlier_seconds = max((record.get("seconds", 0.0) for record in records), default=0.0)
        estimated, measured = peaks_in(records)
        if measured is not None:
            self._earlier = estimated, measured

    def during(self, phase: str) -> AbstractContextManager[None]:
        """Count a block as ``load``, ``step``, ``evaluation`` or ``save``."""
        return self._peaks.during(phase)

    def after_step(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        techniques: Techniques,
        seconds: float | None,
        num_tokens: int = 0,
    ) -> None:
        """Record a step's seconds and, after the first, the bytes that stay between steps.

        Args:
            model: the model.
            optimizer: its optimizer.
            techniques: those that are on.
            seconds: seconds of the step; None: not typical.
            num_tokens: tokens that it computed, padding included; 0: not known.
        """
        self._has_stepped = True
        if seconds is not None:
            self._step_seconds.append(seconds)
            if num_tokens:
                self._timed.append((seconds, num_tokens))
                if len(self._timed) == 2:  # the first step warms up; a killed run has left the second
                    self._keep_speed()
        if not self._by_category:
            self._by_category = _bytes_that_stay(model, optimizer, techniques, self._device)

    def measured(self) -> Peaks:
        """Return all peaks so far."""
        return Peaks(
            peak_bytes=self._peaks.peak_bytes,
            host_peak_bytes=self._peaks.host_peak_bytes,
            reserved_bytes=self._peaks.reserved_bytes,
            by_phase=dict(self._peaks.by_phase),
            by_category=dict(self._by_category),
            step_seconds=typical_seconds(self._step_seconds),
        )

    def estimated(self) -> Peaks | None:
        """Return the peaks of the estimate; None without an estimate."""
        return None if self.estimate is None else estimated_peaks(self.estimate)

    def rows(self) -> list[Row]:
        """Return estimate and measurement row by row; those of an earlier process if this one has taken no step."""
        return list(compared(*(self._of_earlier() or (self.estimated(), self.measured()))))

    def write_estimate(self, metrics: RunMetrics, step: int) -> None:
        """Write the estimate to the metrics; call this at the start, so that a killed run has left it."""
        if estimated := self.estimated():
            metrics.write({"step": step, "estimated": estimated.to_json()})

    def write_measured(self, metrics: RunMetrics, step: int) -> None:
        """Write the measurement to the metrics, unless this process had no step left to take.

        Next to it are the seconds of the run, from loading on, with those of the processes before it up to the
        checkpoints that it was resumed from, and the devices that took them.
        """
        if self._of_earlier() is None:
            self._keep_speed()
            metrics.write(
                {
                    "step": step,
                    "measured": self.measured().to_json(),
                    "seconds": self._earlier_seconds + time.monotonic() - self._began,
                    "device": name_of(self._device),
                    "num_processes": metrics.ranks.num_processes,
                }
            )

    def _keep_speed(self) -> None:
        """Store a CPU step's measured time in the user's cache folder, for estimates on this machine.

        A step with fewer than half of the estimated step's tokens says too little about it and is not stored.
        """
        estimate = self.estimate
        work = None if estimate is None or estimate.processes is not None else estimate.cpu_work
        warm = self._timed[1:] or self._timed
        if estimate is None or work is None or not warm:
            return
        tokens = statistics.median(num_tokens for _, num_tokens in warm)
        if tokens < LEAST_SHARE_OF_TOKENS * work.tokens:
            return
        step = TimedStep(
            work=work,
            tokens=tokens,
            seconds=statistics.median(seconds / num_tokens for seconds, num_tokens in warm) * work.tokens,
            model=estimate.model.name,
            date=datetime.date.today().isoformat(),
        )
        keep_timed_step(step, torch.get_num_threads())

    def _of_earlier(self) -> tuple[Peaks | None, Peaks] | None:
        return None if self._has_stepped else self._earlier


def _bytes_that_stay(
    model: nn.Module, optimizer: Optimizer, techniques: Techniques, device: torch.device
) -> dict[str, int]:
    """Return the bytes of weights and of optimizer state on a device between two steps, each storage counted once."""
    weights: list[Tensor] = [*model.parameters(), *model.buffers()]
    weights += [memory.memory for memory in techniques.weight_memory()]
    weights += [leaf for weight in weights for leaf in _leaves(getattr(weight, "quant_state", None))]
    state = [leaf for values in optimizer.state.values() for leaf in _leaves(values)]
    seen: set[int] = set()
    return {
        name: sum(_new_storages(tensors, device, seen))
        for name, tensors in (("parameter", weights), ("optimizer_state", state))
    }


def _leaves(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in any value: in containers, and in objects with tensor attributes."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__"):
            yield from (value for value in vars(leaf).values() if isinstance(value, Tensor))


def _new_storages(tensors: Iterable[Tensor], device: torch.device, seen: set[int]) -> Iterator[int]:
    for tensor in tensors:
        storage = local_part(tensor).untyped_storage()
        if tensor.device.type == device.type and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage.nbytes()
