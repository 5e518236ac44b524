"""How far a run may lie from its estimate, and what a verdict makes of that: the rule and all its numbers.

The rule:

- An estimate is a figure and a range around it: what the caching allocator holds may be off by a share of itself, what
  lies outside the allocator (above all the CUDA context) by a larger share of itself.
- The upper end decides. It *fits* if the upper end stays within the limit; the allocator gives cached memory back
  before it fails, so that what counts at a limit it knows is whether it can.
- What fits is *tight* where the figure leaves less than :data:`TIGHT_SHARE` of the limit, the device's or the host's.
  The range is made of runs that somebody measured. Others (streamed weights, segments that grow) are believed to be as
  near, and have not been measured.

The numbers, from ``tests/data/measured``, which ``tests/estimator/test_against_public.py`` and
``test_against_measured.py`` hold the estimates to:

==============================  ===========================================================================
allocated                       0.1 % at most in 20 16-bit LoRA runs on a T4, 4 % in 41 with 4-bit weights;
                                0.04 % in steps on a CPU
reserved, 16-bit weights        0.3 % in the median and 3.0 % at most in 44 runs on a T4, an RTX 4080 and an L40S, full
                                fine-tuning and batches of many lengths among them (:data:`RESERVED_SHARE`)
reserved, 4-bit weights         1.2 % in the median and 6.0 % at most in 26 runs (:data:`QUANTIZED_RESERVED_SHARE`),
                                under libraries that this package takes; transformers 5.0 loads in an order left to
                                chance: 12.6 %. ``scripts/fit_ranges.py`` fits both shares, and with them 65 of 70
                                runs were held whose whole source it had not seen
context, read on such a card    two A100 differ by 1 %, 14 runs on a T4 not at all; other drivers are not
                                known: an allowance (:data:`CONTEXT_SHARE`)
context, an estimate            the catalogue's formula is 18 % low on a T4, 5 % low on an L4, 4 % high on an
                                A100, 2 % high on an H100 (:data:`ESTIMATED_CONTEXT_SHARE`)
process without a GPU           362 MiB and a KiB for each token of the vocabulary. Whole runs on an AMD processor held,
                                beside their tensors, 9 % less to 41 % more, with what the heap keeps
                                (``whole-runs-cpu.json``); builds of torch for CUDA, whose 140 MiB come on top, 2 % less
                                to 3 % more (:data:`CPU_PROCESS_SHARE`)
heap, without a GPU             what the C library keeps of freed tensors, as a share of those in it at the peak. In
                                runs of this package, whose tensors above 4 MiB ``system/malloc.py`` keeps out of
                                it, 8 % (:data:`HEAP_SHARE_OF_RUNS`), chosen by the rows of ``whole-runs-cpu.json`` and
                                tried on no others. In scripts of others, below 32 MiB: 6 to 9 % with adapters, 11 to
                                13 % with float32 weights, 25 to 57 % where bfloat16 weights are trained, kernels
                                included, and not the same when repeated (:data:`HEAP_SHARE`)
==============================  ===========================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from lowmem_ft.foundation.units import MIB

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_Bytes = TypeVar("_Bytes", float, "NDArray[np.float64]")

RESERVED_SHARE = 0.017
QUANTIZED_RESERVED_SHARE = 0.061
CONTEXT_SHARE = 0.10
ESTIMATED_CONTEXT_SHARE = 0.25
CPU_PROCESS_SHARE = 0.16
HEAP_SHARE = 0.30
HEAP_SHARE_OF_RUNS = 0.08
"""Of the tensors in the heap, counted on top of them; the range around it is from nothing to twice as much. In
programs of others, and in runs of this package, which keep large tensors out of it."""

LARGEST_IN_HEAP_BYTES = 32 * MIB
"""Larger blocks glibc asks the system for one by one, and gives back as soon as they are freed (``mallopt(3)``)."""

TIGHT_SHARE = 0.06
"""Of a limit: as much as the worst of the measured runs was off."""


@dataclass(frozen=True, kw_only=True)
class Uncertainty:
    """How far a process may lie from its estimate, either way.

    Args:
        reserved_share: of what the allocator holds; without a GPU, of what the heap keeps.
        outside_share: of what the process holds beside that.
    """

    reserved_share: float
    outside_share: float

    def bytes_of(self, reserved_bytes: int, outside_bytes: int) -> int:
        """The distance to either end of the range."""
        return round(self.reserved_share * reserved_bytes + self.outside_share * outside_bytes)


def uncertainty_on_gpu(*, is_quantized: bool, context_is_estimate: bool) -> Uncertainty:
    """How far a run on a GPU may lie from its estimate.

    Args:
        is_quantized: whether weights are held in 4 or 8 bits, which are made block by block while the model loads.
        context_is_estimate: whether nobody has read the size of this GPU's context.

    Returns:
        The shares.
    """
    return Uncertainty(
        reserved_share=QUANTIZED_RESERVED_SHARE if is_quantized else RESERVED_SHARE,
        outside_share=ESTIMATED_CONTEXT_SHARE if context_is_estimate else CONTEXT_SHARE,
    )


def uncertainty_on_cpu() -> Uncertainty:
    """How far a run without a GPU may lie from its estimate."""
    return Uncertainty(reserved_share=1.0, outside_share=CPU_PROCESS_SHARE)


def is_tight(needed_bytes: int, limit_bytes: int | None) -> bool:
    """Whether less than :data:`TIGHT_SHARE` of a limit is left; never without one."""
    return limit_bytes is not None and with_headroom(needed_bytes) > limit_bytes


def with_headroom(num_bytes: _Bytes) -> _Bytes:
    """The smallest limit under which so many bytes are not tight."""
    return num_bytes / (1 - TIGHT_SHARE)
