"""Beam search while tracing: it takes all of its steps, and its result is as long as they make it.

A trace knows neither whether a better beam is possible nor at which step the best one ended, whose length the result is
cut to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lowmem_ft.foundation.upstream.import_hooks import wrap_when_imported
from lowmem_ft.virtual_gpu.values.constant_propagation import known_values, set_values


def beam_search_to_its_length(undo: contextlib.ExitStack) -> None:
    """Let ``generate(num_beams=...)`` take all of its steps until a stack is undone, as it does without beams."""
    for name, around in (
        ("_beam_search_has_unfinished_sequences", _yes_if_unknown),
        ("_update_finished_beams", _with_lengths),
    ):
        wrap_when_imported(undo, "transformers.generation.utils", "GenerationMixin", name, around)


def _yes_if_unknown(has_unfinished: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    answer = has_unfinished(*args, **kwargs)
    return answer if known_values(answer) is not None else torch.tensor(True)


def _with_lengths(
    update: Callable[..., tuple[Tensor, ...]],
    *args: Any,
    cur_len: int,
    decoder_prompt_len: int,
    **kwargs: Any,
) -> tuple[Tensor, ...]:
    """Let each unknown beam be one that ends here.

    ``beam_indices`` holds, for each token generated, the beam that it came from, and -1 where no token exists yet.
    """
    results = update(*args, cur_len=cur_len, decoder_prompt_len=decoder_prompt_len, **kwargs)
    beam_indices = results[2]
    if known_values(beam_indices) is None:
        with _disable_current_modes():
            values = torch.full(beam_indices.shape, -1, dtype=beam_indices.dtype)
            values[..., : cur_len + 1 - decoder_prompt_len] = 0
        set_values(beam_indices, values)
    return results
