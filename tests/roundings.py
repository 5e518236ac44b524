"""How far apart the same sums may be in another order: by another processor, library or number of threads.

A float32 sum is rounded once a term. At the worst the roundings add up; as a rule they go by the root of their number.
"""

ROUNDING = 2.0**-24
"""Of float32, as a share of the number that is rounded."""

TERMS = 1000
"""Of the longest sums in tests: a gradient's, over the tokens of a step."""

LOSS = 2**5 * ROUNDING
"""Share by which two losses may differ: the root of the terms."""

SMOOTH_ADAMW = "optimizer.eps=1e-3"
"""For weights that are compared one by one. AdamW divides a gradient by its own size: where that is all rounding, even
its sign is, and a weight is off by any part of two learning rates, 1e-5 in one run and 1e-4 on another processor. With
an eps near the size of the tests' gradients (a norm of 2 over 40,000) an update is as near as its gradient."""


def of_updates(steps: int, learning_rate: float) -> float:
    """How far a weight may be off after steps of AdamW with an eps of :data:`SMOOTH_ADAMW`."""
    return steps * learning_rate * TERMS * ROUNDING
