"""Bytes that a program holds at one moment, or held at most, for each way of counting them."""

from __future__ import annotations

from dataclasses import dataclass, fields


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
