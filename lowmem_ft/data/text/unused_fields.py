"""Fields of other tools' formats that the text which the model reads does not have: counted, or refused.

Formats read the fields that they have a place for (formats.py), and a chat template may ignore what it is given, so
each value is looked for in the text. Counted is what says more about a right answer than the model sees: earlier turns,
tools, reasoning. Refused are judged answers (``label`` and ``kto_tag`` of KTO), of which bad ones would be learnt, too,
and images, videos and sound: the text would be about what the model does not see. Sources: TRL's dataset formats,
OpenAI's fine-tuning guide, and the data pages of axolotl, LLaMA-Factory and ms-swift, 2026.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lowmem_ft.data.text.examples import Row
from lowmem_ft.data.text.formats import HISTORY, REASONING, SYSTEM, TOOLS, ExampleFormat
from lowmem_ft.data.text.messages import raw_messages
from lowmem_ft.data.text.other_kinds import judged_answers
from lowmem_ft.data.text.token_rows import FURTHER
from lowmem_ft.data.text.tool_calls import is_described, read_tools
from lowmem_ft.foundation.errors import DataError


def _says_something(value: Any) -> bool:
    return value is not None and value is not False and value not in ("", [], {})


def _is_number_other_than(*numbers: float) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, (int, float)) and not isinstance(value, bool) and value not in numbers
    )


@dataclass(frozen=True, kw_only=True)
class UnusedField:
    """A field that other tools read.

    Args:
        names: its names.
        what_happens: the rest of a sentence that begins with how many examples have it, and the way out.
        counts: whether a value is meaningful.
        may_be_written: whether the text can have the value, which is then used.
    """

    names: tuple[str, ...]
    what_happens: str
    counts: Callable[[Any], bool] = _says_something
    may_be_written: bool = False

    def found(self, values: Row, text: str) -> bool:
        """Return whether a row or message has the field, and the text of its example does not."""
        names = [name for name in self.names if self.counts(values.get(name))]
        if self.may_be_written:
            names = [name for name in names if not _is_written(name, values[name], text)]
        return bool(names)

    def __str__(self) -> str:
        return " or ".join(f"`{name}`" for name in self.names)


OF_ROWS = (
    UnusedField(
        names=SYSTEM,
        what_happens=(
            " that the model does not see: the chat template does not write it, the chat has a system message of its "
            "own, or the rows are plain strings. Put it into the prompt, or into a system message of each chat."
        ),
        may_be_written=True,
    ),
    UnusedField(
        names=HISTORY,
        what_happens=", but the model does not see all of the earlier turns. Write the rows as messages.",
        may_be_written=True,
    ),
    UnusedField(
        names=TOOLS,
        what_happens=(
            ", but the model does not see which tools exist: the chat template does not write them, or the rows are "
            "plain strings. Set data.chat_template to a template that writes tools, or put their descriptions into a "
            "system message."
        ),
        may_be_written=True,
    ),
    UnusedField(
        names=REASONING,
        what_happens=(
            ", which the model neither sees nor learns: the chat template does not write it, or the format has no "
            "place for it. Write it into the answer, or set data.chat_template to a template that writes "
            "reasoning_content."
        ),
        may_be_written=True,
    ),
    UnusedField(
        names=("chat_template_kwargs",),
        what_happens=", which the chat template is not given. Remove the column.",
    ),
    UnusedField(
        names=("weight",),
        what_happens=(
            " other than 1, and every learnt token counts the same. Leave out the rows that should not be learnt."
        ),
        counts=_is_number_other_than(1),
    ),
)
"""Columns in addition to those that a format reads."""

OF_MESSAGES = (
    UnusedField(
        names=REASONING,
        what_happens=(
            " in a message, which the chat template does not write: the model neither sees nor learns it. Set "
            "data.chat_template to a template that writes it. One that writes only the last answer's has to be given "
            "chats that end with the answer."
        ),
        may_be_written=True,
    ),
    UnusedField(
        names=TOOLS,
        what_happens=" in a message, which the chat template does not write: the model does not see which tools "
        "exist. Put them into a column `tools` of the row.",
        may_be_written=True,
    ),
    UnusedField(
        names=("weight",),
        what_happens=" in a message that is neither 0 nor 1, and every learnt turn counts the same.",
        counts=_is_number_other_than(0, 1),
    ),
    UnusedField(
        names=("train_detail", "training_detail"),
        what_happens=" in a message, which selects parts of a turn, but turns are learnt whole. Remove the parts that "
        "should not be learnt.",
    ),
)
"""Keys of a message."""

ALL = (*OF_ROWS, *OF_MESSAGES)

_NOT_TEXT = ("images", "image", "videos", "video", "audios", "audio")
_JUDGED = ("label", "kto_tag")
_KNOWN_OF_ROWS = {*_NOT_TEXT, *_JUDGED, *(name for field in OF_ROWS for name in field.names)}
_KNOWN_OF_MESSAGES = {"role", "from", "content", "value", "tool_calls", "function_call", *REASONING, *TOOLS}
_KNOWN_OF_MESSAGES |= {"weight", "train", "training", "loss"}


def _is_written(name: str, value: Any, text: str) -> bool:
    """Return whether a text contains a value: all of its strings, and for tools names, descriptions and parameters."""
    if name in TOOLS:
        return all(is_described(tool, text) for tool in read_tools(value, name))
    if isinstance(value, list):
        return all(_is_written(name, inner, text) for inner in value)
    return str(value).strip() in text


def columns_to_read(example_format: ExampleFormat, columns: Sequence[str]) -> list[str]:
    """Return the columns of the format, and those whose values are checked to be counted or rejected."""
    known = {"text": (), "tokens": (*_NOT_TEXT, *_JUDGED, *FURTHER)}.get(example_format.name, _KNOWN_OF_ROWS)
    more = [name for name in columns if name in known]
    others = (name for group in example_format.others for name in group)
    return list(dict.fromkeys((*example_format.columns, *others, *more)))


def columns_left(example_format: ExampleFormat, row: Row) -> list[str]:
    """Return the columns of a row that the format does not read."""
    read = {*example_format.columns, *example_format.further_columns(row)}
    return [name for name in row if name not in read]


def keys_left(example_format: ExampleFormat, row: Row, template: str | None) -> list[str]:
    """Return the keys of a row's messages that nothing here knows and the chat template does not read."""
    keys = dict.fromkeys(str(key) for message in _messages(example_format, row) for key in message)
    return [key for key in keys if key not in _KNOWN_OF_MESSAGES and not _is_named(key, template or "")]


def unused_fields(example_format: ExampleFormat, row: Row, text: str) -> int:
    """Return which fields of ``ALL`` a row has and its text does not, a bit each: 1 for the first.

    Args:
        example_format: reader of the row.
        row: the values of :func:`columns_to_read`.
        text: what the model reads of it.
    """
    if example_format.name in ("text", "tokens"):
        return 0
    further = {name: value for name, value in row.items() if name not in example_format.columns}
    messages = list(_messages(example_format, row))
    found = [field.found(further, text) for field in OF_ROWS]
    found += [any(field.found(message, text) for message in messages) for field in OF_MESSAGES]
    return sum(1 << bit for bit, is_there in enumerate(found) if is_there)


def fields_of(bits: int) -> Iterator[UnusedField]:
    """Yield the fields that :func:`unused_fields` found."""
    yield from (field for bit, field in enumerate(ALL) if bits >> bit & 1)


def refuse_images(example_format: ExampleFormat, row: Row) -> None:
    """Reject a row with images, videos or sound in addition to its text.

    Args:
        example_format: reader of the row; it rejects those within a message itself.
        row: the values of :func:`columns_to_read`.

    Raises:
        DataError: if it has any.
    """
    for name in _NOT_TEXT:
        if name not in example_format.columns and _says_something(row.get(name)):
            raise DataError(
                f"lowmem_ft trains on text, got a row with {name}: the model would learn to talk about what it does "
                f"not see. Leave those rows out, or remove the column {name} if the text needs none."
            )


def refuse_judged_answers(example_format: ExampleFormat, row: Row) -> None:
    """Reject a row whose answer is judged as good or bad: training would learn both alike.

    Args:
        example_format: reader of the row.
        row: the values of :func:`columns_to_read`.

    Raises:
        DataError: if it is.
    """
    if example_format.name == "text" or set(_JUDGED) & set(example_format.columns):
        return
    if problem := judged_answers(row):
        raise DataError(problem)


def _messages(example_format: ExampleFormat, row: Row) -> Iterator[Row]:
    for name in example_format.columns if example_format.name != "tokens" else ():
        value = row.get(name)
        if example_format.name in ("messages", "conversations"):
            value = raw_messages(value)
        yield from value if isinstance(value, list) else ()


def _is_named(key: str, template: str) -> bool:
    return re.search(rf"\b{re.escape(key)}\b", template) is not None
