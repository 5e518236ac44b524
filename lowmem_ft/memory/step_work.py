"""The work of one step on a processor, as one number: seconds on a reference processor."""

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
    """

    flops: float
    num_bytes: float
    num_operators: float
    dtype: str
    tokens: int

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
