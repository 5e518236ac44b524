"""Beam search while tracing: it goes on until its length ends it, as whether a better beam is possible nobody knows."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lowmem_ft.upstream.patches import existing, loaded_module, replace
from lowmem_ft.virtual_gpu.values.constant_propagation import known_values

_NAME = "_beam_search_has_unfinished_sequences"


@contextlib.contextmanager
def beam_search_to_its_length() -> Iterator[None]:
    """Let ``generate(num_beams=...)`` take all of its steps in a block; without beams it does."""
    generation = loaded_module("transformers.generation.utils")
    with contextlib.ExitStack() as undo:
        if generation is not None:
            owner = existing(generation, "GenerationMixin")
            replace(undo, owner, _NAME, staticmethod(_yes_if_unknown(existing(owner, _NAME))))
        yield


def _yes_if_unknown(has_unfinished: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(has_unfinished)
    def ask(*args: object, **kwargs: object) -> Tensor:
        answer = has_unfinished(*args, **kwargs)
        return answer if known_values(answer) is not None else torch.tensor(True)

    return ask
