"""Generation in a script: ``generate`` runs on a few of its tokens, in a phase of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from lowmem_ft.foundation.upstream.import_hooks import wrap_when_imported
from lowmem_ft.virtual_gpu.tracing_machine import TracingMachine
from lowmem_ft.virtual_gpu.upstream.coarse_decoding import CoarseDecoding


class ShortGeneration:
    """Lets each ``generate`` of a script decode a few tokens, which stand for all.

    Args:
        machine: the machine that the script runs on.
    """

    def __init__(self, machine: TracingMachine) -> None:
        self._machine = machine
        self._decoding = CoarseDecoding(machine.recorder.alike, self._say)

    @property
    def most_grown_bytes(self) -> int:
        """The most bytes of a cache that a run allocates again for each token."""
        return self._decoding.most_grown_bytes

    def apply(self, undo: contextlib.ExitStack) -> None:
        """Shorten generation from now on, until the stack is undone."""
        for name, around in (("generate", self._generate), ("_sample", self._decoding.sample)):
            wrap_when_imported(undo, "transformers.generation.utils", "GenerationMixin", name, around)

    def _generate(self, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._machine.attribution.generating():
            return generate(*args, **kwargs)

    def _say(self, num_tokens: int, obstacle: str) -> None:
        traced = (
            f"each is traced, because of {obstacle}"
            if obstacle
            else "some are traced, which stand for the others"
        )
        self._machine.say(
            f"generation: every sequence gets all {num_tokens:,} tokens that it may have, as what would end it is not "
            f"known; {traced}"
        )
