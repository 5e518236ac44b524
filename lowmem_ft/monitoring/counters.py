"""Counters of a program's bytes: the device's allocator, the system, or a tracker of every storage."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, fields

import torch

from lowmem_ft.foundation.catalog.this_machine import this_machines_gpu
from lowmem_ft.foundation.devices import kernels_of, with_index
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.system.device_memory import (
    ProcessBytes,
    begin_phase,
    peaks_will_be_reset,
    phase_peak_bytes,
    read_device_memory,
)
from lowmem_ft.foundation.system.host_memory import read_host_memory
from lowmem_ft.foundation.tensors.live_tensors import live_tensors
from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker
from lowmem_ft.foundation.virtual_device import VirtualDevice, active_device

_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class MemoryUsage:
    """One reading, or the highest of several, separately for each number; None if it is not counted.

    Attributes:
        allocated_bytes: bytes of tensors on the device.
        reserved_bytes: bytes that the device's caching allocator holds, for tensors and for later ones.
        process_bytes: device memory that the process holds in all, with its context and memory of libraries.
        host_bytes: host memory that the process holds.
    """

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    process_bytes: int | None = None
    host_bytes: int | None = None

    @property
    def fragmentation(self) -> float | None:
        """The share of reserved bytes in no tensor: pieces between tensors, and memory cached for later ones.

        For a peak it is a lower bound: both numbers are at their highest, which may be at two moments.
        """
        if not self.reserved_bytes or self.allocated_bytes is None:
            return None
        return 1 - self.allocated_bytes / self.reserved_bytes

    def highest(self, other: MemoryUsage) -> MemoryUsage:
        """Return the higher of each pair of numbers."""
        return MemoryUsage(
            **{
                field.name: _higher(getattr(self, field.name), getattr(other, field.name))
                for field in fields(self)
            }
        )

    def as_dict(self) -> dict[str, float | None]:
        """Return the numbers for JSON."""
        numbers = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**numbers, "fragmentation": self.fragmentation}


def _higher(one: int | None, other: int | None) -> int | None:
    known = [number for number in (one, other) if number is not None]
    return max(known, default=None)


class Counters:
    """Bytes that the process holds now, and their peak since its last reset, counted by the system at no cost.

    Attributes:
        notes: remarks on the numbers, as sentences, by what they are about.
    """

    def __init__(self) -> None:
        self.notes: dict[str, str] = {}
        self._can_reset = False

    def now(self) -> MemoryUsage:
        """Return the bytes at this moment."""
        return MemoryUsage(host_bytes=read_host_memory().now_bytes)

    def peak(self) -> MemoryUsage:
        """Return the most since the last reset."""
        return MemoryUsage(host_bytes=phase_peak_bytes(_CPU)) if self._can_reset else Counters.now(self)

    def peak_since_start(self) -> MemoryUsage:
        """Return the most since the process began, as far as it is known."""
        return MemoryUsage(host_bytes=read_host_memory().peak_bytes)

    def reset_peak(self) -> None:
        """Reset the peak, after a call of every other reader's watcher."""
        self._can_reset = begin_phase(_CPU)
        if not self._can_reset:
            self.notes["host"] = (
                "This system keeps one host peak for the whole process: the peak of a phase is the highest value read "
                "when phases begin and end."
            )


class _StorageCounters(Counters):
    """Bytes of every storage on the CPU, exactly, and of the process.

    Args:
        tracker: a running tracker.
    """

    def __init__(self, tracker: StorageTracker) -> None:
        super().__init__()
        self._tracker = tracker

    def now(self) -> MemoryUsage:
        """See :class:`Counters`."""
        return super().now().highest(MemoryUsage(allocated_bytes=self._tracker.live_bytes))

    def peak(self) -> MemoryUsage:
        """See :class:`Counters`."""
        return super().peak().highest(MemoryUsage(allocated_bytes=self._tracker.peak_bytes))

    def reset_peak(self) -> None:
        """See :class:`Counters`."""
        super().reset_peak()
        self._tracker.reset_peak()


class _CudaCounters(Counters):
    """The counters of torch's allocator, which change when the host requests memory: no need to wait for kernels.

    Args:
        device: a CUDA device with its index.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        torch.cuda.init()  # without a context there are no counters to reset
        self._process = ProcessBytes(device, this_machines_gpu(device).held_by_others_bytes or 0)

    def now(self) -> MemoryUsage:
        """See :class:`Counters`."""
        return super().now().highest(self._read("current"))

    def peak(self) -> MemoryUsage:
        """See :class:`Counters`."""
        return super().peak().highest(self._read("peak"))

    def peak_since_start(self) -> MemoryUsage:
        """See :class:`Counters`."""
        allocated = MemoryUsage(allocated_bytes=read_device_memory(self._device).peak_bytes)
        return super().peak_since_start().highest(self.peak()).highest(allocated)

    def reset_peak(self) -> None:
        """See :class:`Counters`."""
        begin_phase(self._device)
        super().reset_peak()

    def _read(self, which: str) -> MemoryUsage:
        """Read ``current`` or ``peak``: memory outside the allocator does not shrink while the process lives."""
        stats = torch.cuda.memory_stats(self._device)
        reserved_bytes = stats[f"reserved_bytes.all.{which}"]
        return MemoryUsage(
            allocated_bytes=stats[f"allocated_bytes.all.{which}"],
            reserved_bytes=reserved_bytes,
            process_bytes=self._outside_bytes(stats["reserved_bytes.all.current"]) + reserved_bytes,
        )

    def _outside_bytes(self, reserved_bytes: int) -> int:
        process_bytes, self.notes["process"] = self._process.read()
        return process_bytes - reserved_bytes


class _VirtualCounters(_CudaCounters):
    """Counters of a virtual GPU's trace so far. Host memory belongs to the tracing process, and is not counted."""

    def __init__(self, device: VirtualDevice) -> None:
        Counters.__init__(self)
        self.notes["process"] = "the virtual GPU: reserved and the catalogue's context"
        self._device = torch.device("cuda", 0)
        self._outside = device.outside_bytes()

    def now(self) -> MemoryUsage:
        """See :class:`Counters`."""
        return self._read("current")

    def peak(self) -> MemoryUsage:
        """See :class:`Counters`."""
        return self._read("peak")

    def peak_since_start(self) -> MemoryUsage:
        """See :class:`Counters`."""
        return self.peak()

    def reset_peak(self) -> None:
        """See :class:`Counters`."""
        peaks_will_be_reset()
        torch.cuda.reset_peak_memory_stats(self._device)

    def _outside_bytes(self, reserved_bytes: int) -> int:
        return self._outside


def device_to_measure(device: torch.device | str | None) -> torch.device:
    """Return the device whose memory is measured, with its index; None: CUDA if available, else the CPU.

    Raises:
        UserError: for a device that is not there, or whose allocator has no such counters.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = kernels_of(device)
    if kind not in ("cpu", "cuda"):
        raise UserError(f"Memory is measured on cuda and cpu, got the device {device}. Name one of them.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"Memory is to be measured on {device}, but torch finds no CUDA device here. Leave the device out, or "
            "measure inside the block of a `VirtualGPU`."
        )
    device = with_index(device)
    if kind == "cuda" and device.index >= torch.cuda.device_count():
        raise UserError(
            f"Memory is to be measured on {device}, but the last device that torch finds here is "
            f"cuda:{torch.cuda.device_count() - 1}. Name it, or leave the device out."
        )
    return device


def counters_of(device: torch.device, running: contextlib.ExitStack, *, exact: bool) -> Counters:
    """Start the counters of a device.

    Args:
        device: a result of :func:`device_to_measure`.
        running: receives whatever has to end.
        exact: count every storage of a CPU; CUDA's counters are exact as they are.
    """
    if device.type != "cpu" and (virtual := active_device()):  # in its block "cuda" means the virtual GPU
        return _VirtualCounters(virtual)
    if device.type == "cuda":
        return _CudaCounters(device)
    if not exact:
        return Counters()
    tracker = StorageTracker()
    for tensor in live_tensors():
        tracker.add(tensor)
    return _StorageCounters(running.enter_context(tracker))
