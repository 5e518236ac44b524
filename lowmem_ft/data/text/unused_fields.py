"""Fields of other tools' formats that training here does not use: reported with their count, or rejected.

A field that says that an answer must not be learnt is rejected if that answer would be: ``label`` and ``kto_tag`` of
KTO, ``weight: 0`` (OpenAI, Mistral), ``train: false`` (axolotl) and ``loss: false`` (ms-swift) of a turn. So are
images, videos and sound: the text would be about what the model does not see. A field with more about a right answer
than is used (earlier turns, tools, reasoning that the template does not write) loses what it would have taught, so it
is counted and a warning is logged. Sources: TRL's dataset formats, OpenAI's fine-tuning guide,
and the data pages of axolotl, LLaMA-Factory and ms-swift, 2026.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lowmem_ft.data.config import LossOn
from lowmem_ft.data.text.formats import ASSISTANT_ROLES, ExampleFormat, Row
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
        is_written_by_template: whether it is used if the chat template names it.
    """

    names: tuple[str, ...]
    what_happens: str
    counts: Callable[[Any], bool] = _says_something
    is_written_by_template: bool = False

    def found(self, values: Row, template: str | None) -> bool:
        """Return whether a row or message has the field unused; what an unknown template would write is not known."""
        names = [name for name in self.names if self.counts(values.get(name))]
        if self.is_written_by_template:
            names = [name for name in names if template is not None and not _is_named(name, template)]
        return bool(names)

    def __str__(self) -> str:
        return " or ".join(f"`{name}`" for name in self.names)


OF_ROWS = (
    UnusedField(
        names=("system", "system_prompt"),
        what_happens=", which the model does not see. Put it into a system message of each chat.",
    ),
    UnusedField(
        names=("history",),
        what_happens=", so the model does not see the earlier turns. Write the rows as messages.",
    ),
    UnusedField(
        names=("tools", "functions"),
        what_happens=(
            ", so the model does not see which tools exist. Put their descriptions into a system message."
        ),
    ),
    UnusedField(
        names=("reasoning_content", "reasoning", "thinking"),
        what_happens=", which the model neither sees nor learns. Write it into the answer.",
    ),
    UnusedField(
        names=("chat_template_kwargs",),
        what_happens=", which the chat template is not given. Remove the column.",
    ),
    UnusedField(
        names=("label", "kto_tag"),
        what_happens=" of 0, and their answers are learnt like all others. If 0 marks a bad answer, leave those rows "
        "out.",
        counts=lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and value == 0,
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
        names=("reasoning_content", "reasoning", "thinking"),
        what_happens=" in a message, which the chat template does not write: the model neither sees nor learns it. Set "
        "data.chat_template to a template that writes it.",
        is_written_by_template=True,
    ),
    UnusedField(
        names=("tools", "functions"),
        what_happens=" in a message, which the chat template does not write: the model does not see which tools "
        "exist. Put their descriptions into the content.",
        is_written_by_template=True,
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

_BAD = ("label", "kto_tag")
_NOT_TEXT = ("images", "image", "videos", "video", "audios", "audio")
_TRAINED = ("train", "training", "loss")
_KNOWN_OF_ROWS = {*_NOT_TEXT, *(name for field in OF_ROWS for name in field.names)}
_USED_OF_MESSAGES = {"role", "from", "content", "value", "tool_calls", "function_call"}


def columns_to_read(example_format: ExampleFormat, columns: Sequence[str]) -> list[str]:
    """Return the columns of the format, and those whose values are checked to be counted or rejected."""
    more = [] if example_format.name == "text" else [name for name in columns if name in _KNOWN_OF_ROWS]
    return list(dict.fromkeys((*example_format.columns, *more)))


def columns_left(example_format: ExampleFormat, columns: Sequence[str]) -> list[str]:
    """Return the columns that the format does not read."""
    return [name for name in columns if name not in example_format.columns]


def keys_left(example_format: ExampleFormat, row: Row, template: str | None) -> list[str]:
    """Return the keys of a row's messages that neither we nor the chat template read."""
    keys = dict.fromkeys(str(key) for message in _messages(example_format, row) for key in message)
    return [key for key in keys if key not in _USED_OF_MESSAGES and not _is_named(key, template or "")]


def unused_fields(example_format: ExampleFormat, row: Row, template: str | None) -> int:
    """Return which fields of ``ALL`` a row has, a bit each: 1 for the first.

    Args:
        example_format: reader of the row.
        row: the values of :func:`columns_to_read`.
        template: the chat template, if it is known and renders the row.
    """
    if example_format.name == "text":
        return 0
    unread = {name: value for name, value in row.items() if name not in example_format.columns}
    messages = list(_messages(example_format, row))
    found = [field.found(unread, None) for field in OF_ROWS]
    found += [any(field.found(message, template) for message in messages) for field in OF_MESSAGES]
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


def refuse_bad_answers(example_format: ExampleFormat, row: Row, loss_on: LossOn) -> None:
    """Reject a row that says that an answer which would be learnt must not be.

    Args:
        example_format: reader of the row.
        row: the values of :func:`columns_to_read`.
        loss_on: which turns are learnt.

    Raises:
        DataError: if it does.
    """
    if example_format.name == "text":
        return
    for name in _BAD:
        if name not in example_format.columns and _is_false(row.get(name)):
            raise DataError(
                f"{name}=false says that the answer is a bad one (TRL's and LLaMA-Factory's KTO), and lowmem_ft "
                "trains supervised: the answer would be learnt as a good one. Leave those rows out, or remove the "
                "column to learn all of them. TRL's KTOTrainer learns from both kinds."
            )
    for number, message in enumerate(turns := list(_messages(example_format, row))):
        if (said := _not_to_be_learnt(message)) and number in _learnt(example_format, row, turns, loss_on):
            others = (
                "Set data.loss_on=completion to learn only the last turn of each chat, "
                if loss_on == "assistant" and number < len(turns) - 1
                else "Remove the turn and those after it, "
            )
            raise DataError(
                f"Message {number + 1} has {said}, which excludes it from learning, but here it would be learnt "
                f"(data.loss_on={loss_on}). {others}or remove that key to learn it."
            )


def _learnt(example_format: ExampleFormat, row: Row, turns: list[Row], loss_on: LossOn) -> set[int]:
    """Return the messages of a row that are learnt."""
    if loss_on == "all":
        return set(range(len(turns)))
    answers = [number for number, message in enumerate(turns) if _role(message) in ASSISTANT_ROLES]
    if loss_on == "assistant":
        return set(answers)
    if example_format.name == "prompt_completion":
        prompt = row[example_format.columns[0]]
        return {number for number in answers if number >= len(prompt)}
    return set(answers[-1:])


def _not_to_be_learnt(message: Row) -> str | None:
    """Return the message's field that excludes it from learning; None if it has no such field."""
    weight = message.get("weight")
    if weight is not None and not isinstance(weight, bool) and weight == 0:
        return f"weight: {weight}"
    return next((f"{name}: false" for name in _TRAINED if message.get(name) is False), None)


def _is_false(value: Any) -> bool:
    """Return whether a value is false, as in JSON and Parquet, or in the words of a CSV file."""
    return value is False or (isinstance(value, str) and value.strip().lower() == "false")


def _role(message: Row) -> str:
    return str(message.get("role") or message.get("from")).lower()


def _messages(example_format: ExampleFormat, row: Row) -> Iterator[Row]:
    for name in example_format.columns:
        value = row.get(name)
        yield from value if isinstance(value, list) else ()


def _is_named(key: str, template: str) -> bool:
    return re.search(rf"\b{re.escape(key)}\b", template) is not None
