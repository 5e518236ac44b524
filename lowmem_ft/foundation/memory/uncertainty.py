"""The distance of a run from its estimate, and its effect on the verdict: the rule and all its numbers.

The rule:

- An estimate is a figure and a range around it: the caching allocator's bytes may be off by a share of themselves,
  bytes outside the allocator (above all the CUDA context) by a larger share of themselves.
- The upper end decides. An estimate *fits* if the upper end stays within the limit; the allocator gives cached memory
  back before it fails, so at a limit that it knows, what counts is whether giving back suffices.
- An estimate that fits is *tight* if the figure leaves less than :data:`TIGHT_SHARE` of the limit, the device's or the
  host's. The range comes from measured runs. Others (streamed weights, segments that grow) are believed to be as near,
  and have not been measured.

The numbers, from ``tests/data/measured``; ``tests/planning/estimator/test_against_public.py`` and
``test_against_measured.py`` compare the estimates with them:

==============================  ===========================================================================
allocated                       0.1% at most in 20 16-bit LoRA runs on a T4, 4% in 41 with 4-bit weights;
                                0.04% in steps on a CPU
reserved, 16-bit weights        0.3% in the median and 3.0% at most in 44 runs on a T4, an RTX 4080 and an L40S, full
                                fine-tuning and batches of many lengths among them (:data:`RESERVED_SHARE`)
reserved, 4-bit weights         1.2% in the median and 6.0% at most in 26 runs (:data:`QUANTIZED_RESERVED_SHARE`),
                                under libraries that this package accepts; transformers 5.0 loads in random order:
                                12.6%. ``scripts/calibrate ranges`` fits both shares, and with them 65 of 70 runs from
                                sources that the fit had not seen were within the range
                                context, measured               two A100 differ by 1%, 14 runs on a T4 not at all;
                                other drivers are not
                                known: an allowance (:data:`CONTEXT_SHARE`)
                                context, an estimate            the catalogue's formula is 18% low on a T4, 5% low on
                                an L4, 4% high on an A100, 2% high on an H100 (:data:`ESTIMATED_CONTEXT_SHARE`)
                                process without a GPU           362 MiB and a KiB for each token of the vocabulary.
                                Whole runs on an AMD processor held, in addition to their tensors, 9% less to 41%
                                more, including memory kept by the heap (``whole-runs-cpu.json``); builds of torch for
                                CUDA, which add 140 MiB, 2% less to 3% more (:data:`CPU_PROCESS_SHARE`) heap, without
                                a GPU             memory that the C library keeps of freed tensors, as a share of those
                                in it at the peak. In runs of this package, whose tensors above 4 MiB
                                ``foundation/system/malloc.py`` keeps out of it, 8% (:data:`HEAP_SHARE_OF_RUNS`), chosen
                                by the rows of ``whole-runs-cpu.json`` and tried on no others. In other programs'
                                scripts, below 32 MiB: 6 to 9% with adapters, 11 to 13% with float32 weights, 25 to 57%
                                if bfloat16 weights are trained, including kernels, and not the same when repeated
                                (:data:`HEAP_SHARE`)
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
"""Share of the tensors in the heap, added to them; the range around it is from nothing to twice as much. The first is
for other programs, the second for runs of this package, which keep large tensors out of the heap."""

LARGEST_IN_HEAP_BYTES = 32 * MIB
"""Size above which glibc requests each block from the system, and gives it back once it is freed (``mallopt(3)``)."""

TIGHT_SHARE = 0.06
"""Share of a limit: the largest error of the measured runs."""


@dataclass(frozen=True, kw_only=True)
class Uncertainty:
    """Distance of a process from its estimate, either way.

    Args:
        reserved_share: share of the bytes that the allocator holds; without a GPU, of those that the heap keeps.
        outside_share: share of the other bytes that the process holds.
    """

    reserved_share: float
    outside_share: float

    def bytes_of(self, reserved_bytes: int, outside_bytes: int) -> int:
        """Return the distance to either end of the range, in bytes."""
        return round(self.reserved_share * reserved_bytes + self.outside_share * outside_bytes)


def uncertainty_on_gpu(*, is_quantized: bool, context_is_estimate: bool) -> Uncertainty:
    """Return the distance of a run on a GPU from its estimate.

    Args:
        is_quantized: whether weights are held in 4 or 8 bits, which are made block by block while the model loads.
        context_is_estimate: whether the size of this GPU's context was never measured.

    Returns:
        The shares.
    """
    return Uncertainty(
        reserved_share=QUANTIZED_RESERVED_SHARE if is_quantized else RESERVED_SHARE,
        outside_share=ESTIMATED_CONTEXT_SHARE if context_is_estimate else CONTEXT_SHARE,
    )


def uncertainty_on_cpu() -> Uncertainty:
    """Return the distance of a run without a GPU from its estimate."""
    return Uncertainty(reserved_share=1.0, outside_share=CPU_PROCESS_SHARE)


def is_tight(needed_bytes: int, limit_bytes: int | None) -> bool:
    """Return whether less than :data:`TIGHT_SHARE` of a limit is left; False without a limit."""
    return limit_bytes is not None and with_headroom(needed_bytes) > limit_bytes


def with_headroom(num_bytes: _Bytes) -> _Bytes:
    """Return the smallest limit under which this number of bytes is not tight."""
    return num_bytes / (1 - TIGHT_SHARE)
