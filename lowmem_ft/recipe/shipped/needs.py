"""Stored needs of each shipped recipe on the GPU that it names, kept next to the recipes: an estimate takes minutes.

``scripts/recipe_needs.py`` writes ``recipes/needs.json``; ``tests/planning/estimator/test_recipe_needs.py`` estimates
again and compares.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from lowmem_ft.foundation.catalog.gpu_catalog import CPU
from lowmem_ft.foundation.system.process_size import CUDA_BUILD_BYTES
from lowmem_ft.foundation.units import GIB, format_bytes
from lowmem_ft.foundation.user_paths import recipes_folder

NEEDS_FILE = "needs.json"


@dataclass(frozen=True, kw_only=True)
class RecipeNeeds:
    """The memory that a recipe needs on one device, and its speed there.

    Args:
        gpu: the GPU's name in the catalogue, such as ``8xrtx-4090`` where several share the model; :data:`CPU` for a
            processor.
        memory_bytes: memory of the GPU; 0 for a processor.
        process_peak_bytes: peak of the process on the GPU; for a processor, in host memory.
        host_peak_bytes: host memory of each process; for a processor, with a build of torch for CPUs.
        host_pinned_bytes: the part of it that is pinned.
        step_seconds: seconds of an optimizer step; None for a processor, which has no clock.
        step_tokens: tokens of a step, of all GPUs together; None for a processor.
    """

    gpu: str
    memory_bytes: int
    process_peak_bytes: int
    host_peak_bytes: int
    host_pinned_bytes: int
    step_seconds: float | None
    step_tokens: int | None

    @property
    def tokens_per_second(self) -> float | None:
        """Training tokens per second of all GPUs together; None for a processor."""
        return self.step_tokens / self.step_seconds if self.step_tokens and self.step_seconds else None

    @property
    def spare_share(self) -> float:
        """Share of the GPU's memory that is left; 1 for a processor, whose memory is not known."""
        return 1 - self.process_peak_bytes / self.memory_bytes if self.memory_bytes else 1.0

    def __str__(self) -> str:
        """Return a line such as ``rtx-4060: 4.2 of 7.7 GiB, and 65.7 GiB of host memory``."""
        host = f"{format_bytes(self.host_peak_bytes)} of host memory"
        if self.gpu == CPU:
            with_cuda = format_bytes(self.host_peak_bytes + CUDA_BUILD_BYTES)
            return f"{self.gpu}: {host} ({with_cuda} with torch for CUDA)"
        return f"{self.gpu}: {self.process_peak_bytes / GIB:.1f} of {self.memory_bytes / GIB:.1f} GiB, and {host}"

    @property
    def memory_words(self) -> str:
        """The memory in words, such as ``4.2 GiB of 7.7; 65.7 GiB of host memory``."""
        device = f"{self.process_peak_bytes / GIB:.1f} GiB of {self.memory_bytes / GIB:.1f}"
        return f"{device}; {format_bytes(self.host_peak_bytes)} of host memory"

    @property
    def header_words(self) -> str:
        """The needs as in a recipe's header: the memory, and ``3.5 s a step, 9,373 tokens/s``."""
        if self.tokens_per_second is None:
            return self.memory_words
        return (
            f"{self.memory_words}; {self.step_seconds:.3g} s a step, {self.tokens_per_second:,.0f} tokens/s"
        )


def needs_of_shipped_recipes() -> dict[str, RecipeNeeds]:
    """Return the needs by recipe; a recipe without an estimate is missing."""
    text = (recipes_folder() / NEEDS_FILE).read_text(encoding="utf-8")
    return {name: RecipeNeeds(**needs) for name, needs in json.loads(text)["recipes"].items()}
