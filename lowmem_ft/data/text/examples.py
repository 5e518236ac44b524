"""Examples as formats give them: a chat, a prompt with its completion, raw text, or tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from lowmem_ft.foundation.errors import DataError

if TYPE_CHECKING:
    import numpy as np

    from lowmem_ft.data.text.chat_templates import Message


Row: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Chat:
    """A conversation whose first ``num_prompt_messages`` messages are the prompt; None if the data does not say.

    ``tools`` are those that the model may call, as chat templates take them.
    """

    messages: list[Message]
    num_prompt_messages: int | None = None
    tools: list[Row] = field(default_factory=list)


@dataclass(frozen=True)
class Completion:
    """Two consecutive strings."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Document:
    """Raw text."""

    text: str


@dataclass(frozen=True, eq=False)
class Tokens:
    """Token ids (int32), and whether each is learnt."""

    input_ids_T: np.ndarray
    is_learnt_T: np.ndarray


TextExample: TypeAlias = Chat | Completion | Document
Example: TypeAlias = TextExample | Tokens


@contextlib.contextmanager
def naming_example(sample_id: int, source: str) -> Iterator[None]:
    """Add to an error about a row which row it is."""
    try:
        yield
    except DataError as error:
        raise DataError(
            *(f"Example {sample_id} of {source}: {problem}" for problem in error.problems)
        ) from error
