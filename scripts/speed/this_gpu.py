"""This machine's GPU, in the place of a virtual one; and what a run on either is: seconds and bytes."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lowmem_ft.foundation.system.device_memory import ProcessBytes
from lowmem_ft.virtual_gpu.gpu import VirtualGPU


@dataclass(frozen=True, kw_only=True)
class Result:
    """A run by the clock, or on a GPU.

    Args:
        seconds: seconds of a step.
        outside_products: those that no product of matrices or attention takes; NaN where they were not told apart.
        process_bytes: what the process needs of the GPU's memory.
        fits: whether the GPU has as much.
    """

    seconds: float
    outside_products: float
    process_bytes: int
    fits: bool


class ThisGPU:
    """This machine's GPU, in the place of a virtual one.

    Attributes:
        device: the device.
        step_ends: when each step's work was done, in seconds.
    """

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        self.step_ends: list[float] = []

    def end_step(self) -> None:
        """Wait for a step's work."""
        torch.cuda.synchronize(self.device)
        self.step_ends.append(time.perf_counter())

    def result(self) -> Result:
        """Return the median of the steps after the first, and what the process holds."""
        ends = self.step_ends
        return self.result_of([end - begin for begin, end in itertools.pairwise(ends)])

    def result_of(self, seconds: Sequence[float]) -> Result:
        """Return the median of seconds, and what the process holds."""
        held, _ = ProcessBytes(self.device).read()
        return Result(
            seconds=statistics.median(seconds), outside_products=math.nan, process_bytes=held, fits=True
        )


AnyGPU = VirtualGPU | ThisGPU
