"""Generation in a script: ``generate`` runs on a few of its tokens, in a phase of its own."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from lowmem_ft.foundation.upstream.import_hooks import wrap_when_imported
from lowmem_ft.foundation.upstream.patches import replace
from lowmem_ft.virtual_gpu.tracing_machine import TracingMachine
from lowmem_ft.virtual_gpu.upstream.coarse_decoding import CoarseDecoding

NUM_SEEN = 3
"""Steps to see of which the first generates, the second does not, and the last does."""


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


def generate_in_step(
    trainer: Any, number: int, undo: contextlib.ExitStack, say: Callable[[str], None]
) -> float:
    """Let a trainer that generates for several steps at once do so in a certain step, too.

    Args:
        trainer: any trainer of transformers or TRL; others are left alone.
        number: the number of the step, from 1; its predecessor does not generate.
        undo: ends that.
        say: called with what is assumed.

    Returns:
        The share of its steps that generate.
    """
    steps = getattr(trainer.args, "steps_per_generation", None)
    if steps is None or not hasattr(trainer, "_buffered_inputs") or number < NUM_SEEN:
        return 1.0
    every = steps * trainer.num_iterations // trainer.args.gradient_accumulation_steps
    if every < NUM_SEEN - 1 or (number - 2) % every == 0:
        return 1.0

    def generate(fetch: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if trainer.state.global_step == number - 1:
            trainer._step = 0  # the number of micro-batches since it generated
        return fetch(*args, **kwargs)

    replace(undo, trainer, "get_batch_samples", functools.partial(generate, trainer.get_batch_samples))
    say(f"generation: every {every} steps; seconds and costs are those of an average step")
    return 1 / every
