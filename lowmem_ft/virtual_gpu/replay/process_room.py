"""The memory that the process of a traced program takes of a GPU, with the range of it."""

from __future__ import annotations

from dataclasses import dataclass

from lowmem_ft.foundation.memory.memory_estimate import ProcessRange
from lowmem_ft.foundation.memory.uncertainty import Uncertainty
from lowmem_ft.virtual_gpu.replay.shared_replays import Replays


@dataclass(frozen=True)
class Held:
    """The most that a caching allocator holds, and how often it has to empty its cache to stay within that."""

    peak_bytes: int
    num_retries: int = 0


@dataclass(frozen=True, kw_only=True)
class ProcessRoom:
    """The memory of a GPU for a traced program, and what its process takes of it.

    Args:
        replays: those of the trace by the caching allocator.
        available_bytes: bytes that the process can have.
        outside_bytes: those of them that the process takes outside the allocator.
        allowed_bytes: the most that the allocator lets itself hold; None: the whole memory.
        limit_bytes: the budget, or else what is available.
    """

    replays: Replays
    available_bytes: int
    outside_bytes: int
    allowed_bytes: int | None
    limit_bytes: int

    def held(self, factor: float = 1, further_bytes: int = 0) -> Held | None:
        """Return what the allocator holds; None if it runs out of memory.

        Args:
            factor: scale of the bytes that the program needs: 1% more needs is the same as 1% less room.
            further_bytes: bytes outside the allocator in addition to those expected.
        """
        capacity = int((self.available_bytes - self.outside_bytes - further_bytes) / factor)
        allowed = None if self.allowed_bytes is None else int(self.allowed_bytes / factor)
        most = capacity if allowed is None else min(capacity, allowed)
        if self.replays.reserved_peak_bytes <= most:
            return Held(self.replays.reserved_peak_bytes)
        if self.replays.peak_live_bytes("device") > most:
            return None
        capped = self.replays.within(capacity, allowed)
        return None if capped.out_of_memory else Held(capped.peak_reserved_bytes, capped.num_retries)

    def end_of_range(self, uncertainty: Uncertainty, *, upper: bool) -> int | None:
        """Return the process's bytes at one end of the uncertainty range; None if memory runs out there."""
        sign = 1 if upper else -1
        factor = 1 + sign * uncertainty.reserved_share
        further = sign * uncertainty.bytes_of(0, self.outside_bytes)
        held = self.held(factor, further)
        return None if held is None else round(held.peak_bytes * factor) + self.outside_bytes + further

    def process_peak(self, of_torch: int) -> int:
        """Add managed memory, which moves to the host where the device is full: it takes what is left."""
        managed = self.replays.peak_live_bytes("managed")
        return min(of_torch + managed, max(self.limit_bytes, of_torch))

    def process_range(
        self, reserved: int, highest: int | None, uncertainty: Uncertainty, fragments: int = 0
    ) -> ProcessRange:
        """Return the range of the process's bytes.

        Args:
            reserved: bytes that the allocator reserves.
            highest: the process's bytes at the upper end; None: memory runs out there.
            uncertainty: the distance to either end.
            fragments: bytes that the allocator may hold in further gaps, as far as there is room: else it gives them
                back.
        """
        process, margin = reserved + self.outside_bytes, uncertainty.bytes_of(reserved, self.outside_bytes)
        peak = self.process_peak(process)
        high = max(peak, self.process_peak(highest or process + margin))
        return ProcessRange(
            low_bytes=max(0, peak - margin),
            high_bytes=max(high, min(high + fragments, self.limit_bytes)),
            uncertainty=uncertainty,
        )
