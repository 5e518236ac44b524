"""The work of one step on a processor, and as one number: seconds on a reference processor."""

from __future__ import annotations

from dataclasses import dataclass

FLOPS_PER_SECOND = 100e9
BYTES_PER_SECOND = 10e9
SECONDS_PER_OPERATOR = 10e-6


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """The work that one step asks of a processor.

    Args:
        flops: floating-point operations of products.
        num_bytes: bytes that operators read and write.
        num_operators: calls of operators.
        dtype: type of the operands of most products.
        tokens: tokens of the step.

    Raises:
        ValueError: if a number is not above 0.
    """

    flops: float
    num_bytes: float
    num_operators: float
    dtype: str
    tokens: int

    def __post_init__(self) -> None:
        for number in (self.flops, self.num_bytes, self.num_operators, self.tokens):
            if not 0 < number < float("inf"):
                raise ValueError(f"work is above 0, got {self}")

    @property
    def seconds_by_bound(self) -> dict[str, float]:
        """Seconds on the reference processor, by what takes them."""
        return {
            "compute": self.flops / FLOPS_PER_SECOND,
            "memory bandwidth": self.num_bytes / BYTES_PER_SECOND,
            "calls of operators": self.num_operators * SECONDS_PER_OPERATOR,
        }

    @property
    def reference_seconds(self) -> float:
        """Seconds on the reference processor."""
        return sum(self.seconds_by_bound.values())

    def is_like(self, other: StepWork) -> bool:
        """Return whether two steps are the same work, part by part, up to 2%."""
        mine, theirs = self.seconds_by_bound, other.seconds_by_bound
        return all(abs(mine[part] - theirs[part]) <= _SAME * mine[part] for part in mine)


_SAME = 0.02
