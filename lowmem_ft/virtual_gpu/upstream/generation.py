"""Beam search while tracing: it takes all of its steps, and its result is as long as they make it.

A trace knows neither whether a better beam is possible nor at which step the best one ended, whose length the result is
cut to.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from lowmem_ft.upstream.patches import existing, loaded_module, replace
from lowmem_ft.virtual_gpu.values.constant_propagation import known_values, set_values

_QUESTION, _UPDATE = "_beam_search_has_unfinished_sequences", "_update_finished_beams"


@contextlib.contextmanager
def beam_search_to_its_length() -> Iterator[None]:
    """Let ``generate(num_beams=...)`` take all of its steps in a block, as it does without beams."""
    generation = loaded_module("transformers.generation.utils")
    with contextlib.ExitStack() as undo:
        if generation is not None:
            owner = existing(generation, "GenerationMixin")
            replace(undo, owner, _QUESTION, staticmethod(_yes_if_unknown(existing(owner, _QUESTION))))
            replace(undo, owner, _UPDATE, _with_lengths(existing(owner, _UPDATE)))
        yield


def _yes_if_unknown(has_unfinished: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(has_unfinished)
    def ask(*args: object, **kwargs: object) -> Tensor:
        answer = has_unfinished(*args, **kwargs)
        return answer if known_values(answer) is not None else torch.tensor(True)

    return ask


def _with_lengths(update: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """Let each unknown beam be one that ends here.

    ``beam_indices`` holds, for each token generated, the beam that it came from, and -1 where no token exists yet.
    """

    @functools.wraps(update)
    def updated(
        self: object, *args: object, cur_len: int, decoder_prompt_len: int, **kwargs: object
    ) -> tuple[Tensor, ...]:
        results = update(self, *args, cur_len=cur_len, decoder_prompt_len=decoder_prompt_len, **kwargs)
        beam_indices = results[2]
        if known_values(beam_indices) is None:
            with unset_fake_temporarily():
                values = torch.full(beam_indices.shape, -1, dtype=beam_indices.dtype)
                values[..., : cur_len + 1 - decoder_prompt_len] = 0
            set_values(beam_indices, values)
        return results

    return updated
