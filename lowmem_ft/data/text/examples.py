"""Examples as formats give them: a chat, a prompt with its completion, or raw text."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from lowmem_ft.foundation.errors import DataError

if TYPE_CHECKING:
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


Example: TypeAlias = Chat | Completion | Document


@contextlib.contextmanager
def naming_example(sample_id: int, source: str) -> Iterator[None]:
    """Add to an error about a row which row it is."""
    try:
        yield
    except DataError as error:
        raise DataError(
            *(f"Example {sample_id} of {source}: {problem}" for problem in error.problems)
        ) from error
