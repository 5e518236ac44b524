"""Prompts for a model to answer: the beginnings of held-out examples, or the rows of a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowmem_ft.data.config import FormatName
from lowmem_ft.data.files.reading import Source, open_rows
from lowmem_ft.data.row import IGNORED_LABEL, TokenizedExample
from lowmem_ft.data.text.chat_templates import Message, Renderer
from lowmem_ft.data.text.examples import Chat, naming_example
from lowmem_ft.data.text.formats import ExampleFormat
from lowmem_ft.foundation.errors import DataError

_KEY = "training.generation_prompts"
_COLUMNS: dict[str, FormatName] = {
    "messages": "messages",
    "conversations": "conversations",
    "prompt": "messages",
    "text": "text",
}
"""Columns that hold a prompt, the first one that a file has, with the format of their chats."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt as the model reads it.

    Args:
        input_ids: its tokens.
        text: the same as text, special tokens written out.
        reference: the answer in the data; None: the data has none.
    """

    input_ids: tuple[int, ...]
    text: str
    reference: str | None = None


def prompts_of_examples(
    examples: Iterable[TokenizedExample], tokenizer: PreTrainedTokenizerBase
) -> list[Prompt]:
    """Cut each example before the first token that is learnt; one that is learnt from its beginning, in the middle.

    Args:
        examples: tokenized examples; a chat's prompt ends before its first learnt turn.
        tokenizer: decodes them.

    Returns:
        One prompt for each example, with the learnt tokens that follow as its reference.
    """
    return [_prompt_of_example(example, tokenizer) for example in examples]


def _prompt_of_example(example: TokenizedExample, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    input_ids = example.input_ids_T.tolist()
    is_learnt = [label != IGNORED_LABEL for label in example.labels_T.tolist()]
    start = is_learnt.index(True)
    if start < 2:  # the first token of a text is never learnt, as nothing comes before it
        start = max(1, len(input_ids) // 2)
    end = next((place for place in range(start, len(input_ids)) if not is_learnt[place]), len(input_ids))
    return Prompt(
        input_ids=tuple(input_ids[:start]),
        text=_decoded(tokenizer, input_ids[:start]),
        reference=_decoded(tokenizer, input_ids[start:end], skip_special_tokens=True).strip(),
    )


def read_prompts(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    count: int | None = None,
    max_length: int | None = None,
    system_prompt: str | None = None,
) -> list[Prompt]:
    """Read the prompts of a file: chats in ``messages`` or ``conversations``, a ``prompt``, or lines of text.

    A chat is rendered up to its last turn that is not the assistant's. A prompt that is a string is read as it is, as
    in prompts and completions; a line of text is what a user says, if the tokenizer has a chat template.

    Args:
        path: a local file in any form that ``data.path`` takes.
        tokenizer: renders and tokenizes.
        count: how many to read, the first ones; None: all.
        max_length: tokens that a prompt must stay below; None: not limited.
        system_prompt: system message for chats without one.

    Raises:
        DataError: if the file cannot be read, has no prompt, or one that is empty or too long.
    """
    rows: Any = open_rows(Source(path=path, split="train", setting=_KEY))
    column = next((name for name in _COLUMNS if name in rows.column_names), None)
    if column is None:
        raise DataError(
            f"{_KEY}={path} needs a column of prompts, one of {', '.join(_COLUMNS)}; columns seen: "
            f"{', '.join(rows.column_names)}. Rename one."
        )
    reader = ExampleFormat(name=_COLUMNS[column], columns=(column,), system_prompt=system_prompt)
    prompts = []
    for number, row in enumerate(islice(_iterated(rows), count)):
        with naming_example(number, path):
            prompts.append(_read_prompt(reader, row[column], tokenizer))
            if max_length is not None and len(prompts[-1].input_ids) >= max_length:
                raise DataError(
                    f"a prompt has less than data.max_length={max_length} tokens, so that an answer has room, got "
                    f"{len(prompts[-1].input_ids)}. Shorten it, or raise data.max_length."
                )
    if not prompts:
        raise DataError(f"{_KEY}={path} holds no prompt. Write one a line, or set {_KEY}=null.")
    return prompts


def _iterated(rows: Any) -> Iterator[dict[str, Any]]:
    return iter(rows)


def _read_prompt(reader: ExampleFormat, value: Any, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    (column,) = reader.columns
    if isinstance(value, str):
        if not value.strip():
            raise DataError("a prompt is text, got an empty one. Delete that row.")
        if column != "text" or tokenizer.chat_template is None:
            return _prompt_of_text(value, tokenizer, holds_special_tokens=False)
        value, reader = [{"role": "user", "content": value}], _chats(reader)
    chat = reader.read({column: value})
    if not isinstance(chat, Chat):
        raise DataError(f"a prompt needs text in {column}, got {value!r}. Delete that row.")
    if tokenizer.chat_template is None:
        raise DataError(
            f"{_KEY} holds chats, and the tokenizer has no chat template. Set data.chat_template, or write prompts as "
            "plain strings in a column `prompt`."
        )
    text = Renderer(tokenizer, chat.tools).text(_asked(chat.messages), add_generation_prompt=True)
    return _prompt_of_text(text, tokenizer, holds_special_tokens=True)


def _chats(reader: ExampleFormat) -> ExampleFormat:
    return ExampleFormat(name="messages", columns=reader.columns, system_prompt=reader.system_prompt)


def _asked(messages: Sequence[Message]) -> list[Message]:
    """Return the turns of a chat without the assistant's last ones."""
    asked = list(messages)
    while asked and asked[-1]["role"] == "assistant":
        asked.pop()
    if not asked:
        raise DataError("a chat needs a turn to answer, but it has only assistant turns. Delete that row.")
    return asked


def _prompt_of_text(text: str, tokenizer: PreTrainedTokenizerBase, *, holds_special_tokens: bool) -> Prompt:
    input_ids: Any = tokenizer(text, add_special_tokens=not holds_special_tokens)["input_ids"]
    if not holds_special_tokens and input_ids[-1:] == [tokenizer.eos_token_id]:
        input_ids = input_ids[:-1]  # a tokenizer that ends every text with EOS
    return Prompt(input_ids=tuple(input_ids), text=text)


def _decoded(tokenizer: PreTrainedTokenizerBase, input_ids: Sequence[int], **options: bool) -> str:
    text: Any = tokenizer.decode(list(input_ids), **options)
    return text
