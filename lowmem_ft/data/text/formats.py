"""Formats of examples in the user's columns, and how to read them.

=================  ===============================  ==================================================================
format             columns                           becomes
=================  ===============================  ==================================================================
messages           ``messages``                     a chat, through the tokenizer's template
conversations      ``conversations``                the same; ShareGPT's ``from``/``value`` and ``role``/``content``
prompt_completion  ``prompt``, ``completion``       strings: joined as they are, then EOS, as TRL does (no template);
                                                    message lists: a chat
alpaca             ``instruction``, ``output``,     a user/assistant chat if the tokenizer has a chat template,
                   perhaps ``input``                else the prompt text of Stanford Alpaca, then EOS
text               ``text``                         raw text, then EOS
tokens             ``input_ids``, perhaps           the same tokens (token_rows.py)
                   ``labels``, ``attention_mask``
=================  ===============================  ==================================================================

If columns match several formats, the one higher in the table wins; an Alpaca file may have a ``text`` column. An
example with nothing in a field it needs (null, blank, no turns) is left out and counted; one of the wrong structure is
an error that names it, and so is one without tokens among rows of tokens, or with tokens alone among rows of text.

Chats also take a ``system`` column, for those without a system message, and ``tools``; Alpaca takes ``system``, the
earlier turns in ``history`` and the answer's ``reasoning_content``. All other columns are not used (unused_fields.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowmem_ft.data.config import FormatName
from lowmem_ft.data.text.examples import Chat, Completion, Document, Example, Row
from lowmem_ft.data.text.messages import messages_in, text_in
from lowmem_ft.data.text.token_rows import FURTHER, IDS, read_tokens
from lowmem_ft.data.text.tool_calls import read_tools, shortened
from lowmem_ft.foundation.errors import DataError

if TYPE_CHECKING:
    from lowmem_ft.data.text.chat_templates import Message


SYSTEM, HISTORY = ("system", "system_prompt"), ("history",)
TOOLS, REASONING = ("tools", "functions"), ("reasoning_content", "reasoning", "thinking")
"""Columns with more about an example, by the names that other tools give them; the first one with a value is read."""


@dataclass(frozen=True, kw_only=True)
class ExampleFormat:
    """Reader of an example from a row.

    Args:
        name: one of the formats in the table above.
        columns: the required columns, in the order in which the format's reader takes them.
        system_prompt: system message for chats without one, or None.
        has_chat_template: whether Alpaca examples become chats.
        others: the columns of other formats, a group each, which rows of those formats have in place of its own.
    """

    name: FormatName
    columns: tuple[str, ...]
    system_prompt: str | None = None
    has_chat_template: bool = True
    others: tuple[tuple[str, ...], ...] = ()

    def is_chat(self, row: Row) -> bool:
        """Return whether a chat template is to render the example in a row."""
        if self.name == "prompt_completion":
            return isinstance(row.get(self.columns[0]), list)
        return self.name in ("messages", "conversations") or (
            self.name == "alpaca" and self.has_chat_template
        )

    def further_columns(self, row: Row) -> tuple[str, ...]:
        """Return the columns that it reads in addition to the required ones, where a row has them."""
        if self.name == "tokens":
            names = FURTHER
        elif self.name == "alpaca":
            names = (*SYSTEM, *HISTORY, *(TOOLS if self.has_chat_template else ()))
            names += REASONING if self.has_chat_template else ()
        else:
            names = (*SYSTEM, *TOOLS) if self.is_chat(row) else ()
        return tuple(name for name in names if name not in self.columns)

    def further(self, row: Row, names: Sequence[str]) -> Any:
        """Return the value of the first of some further columns that a row has; None if it has none of them."""
        wanted = [name for name in self.further_columns(row) if name in names]
        return next((row[name] for name in wanted if row.get(name)), None)

    def read(self, row: Row) -> Example | None:
        """Return the example in a row; None if a field that it needs is empty.

        Raises:
            DataError: if the row has the wrong structure.
        """
        nothing = all(row.get(column) is None for column in self.columns)
        other = next(
            (group for group in self.others if all(row.get(name) is not None for name in group)), None
        )
        if nothing and other and (self.name == "tokens" or other == (IDS,)):
            raise DataError(
                f"A file holds rows of text or rows of tokens, got a row with {', '.join(other)} and without "
                f"{', '.join(self.columns)}. Write rows of either kind to a file of their own, and name both, as in "
                "data.path=a.jsonl,b.jsonl."
            )
        return _READERS[self.name](self, row)

    def is_of_another(self, row: Row) -> bool:
        """Return whether a row without an example has nothing in its columns, and all that another format needs."""
        return all(row.get(column) in (None, "") for column in self.columns) and any(
            all(row.get(column) not in (None, "", []) for column in group) for group in self.others
        )


def _read_messages(fmt: ExampleFormat, row: Row) -> Example | None:
    (column,) = fmt.columns
    messages = messages_in(row.get(column), column)
    return _chat(fmt, row, messages) if messages else None


def _chat(fmt: ExampleFormat, row: Row, asked: list[Message], answered: list[Message] | None = None) -> Chat:
    """Return a chat with its row's system message and tools; with an answer, what comes before that is the prompt."""
    system = fmt.further(row, SYSTEM)
    asked = _with_system_prompt(asked, fmt.system_prompt if system is None else text_in(system, "system"))
    tools = read_tools(fmt.further(row, TOOLS), "tools")
    return Chat(asked + (answered or []), None if answered is None else len(asked), tools)


def _read_prompt_completion(fmt: ExampleFormat, row: Row) -> Example | None:
    prompt, completion = (row.get(column) for column in fmt.columns)
    if isinstance(prompt, list) and isinstance(completion, list):
        asked, answered = (messages_in(row.get(column), column) for column in fmt.columns)
        return _chat(fmt, row, asked, answered) if asked and answered else None
    if isinstance(prompt, list) != isinstance(completion, list) and None not in (prompt, completion):
        raise DataError(
            f"{' and '.join(fmt.columns)} are both text or both lists of messages, got {shortened(prompt)} and "
            f"{shortened(completion)}. Use the same type for both."
        )
    texts = [text_in(row.get(column), column) for column in fmt.columns]
    return Completion(*texts) if all(text.strip() for text in texts) else None


def _read_alpaca(fmt: ExampleFormat, row: Row) -> Example | None:
    instruction, output = (text_in(row.get(column), column) for column in fmt.columns[:2])
    context = "".join(text_in(row.get(column), column) for column in fmt.columns[2:])
    if not instruction.strip() or not output.strip():
        return None
    earlier = _history(fmt.further(row, HISTORY))
    if not fmt.has_chat_template:
        system = text_in(fmt.further(row, SYSTEM), "system")
        return Completion(_alpaca_prompt(instruction, context, system, earlier), output)
    question = f"{instruction}\n\n{context}" if context.strip() else instruction
    asked = [message for pair in earlier for message in _turns(*pair)]
    said = _turns(question, output)
    if (reasoning := fmt.further(row, REASONING)) is not None:
        said[1]["reasoning_content"] = text_in(reasoning, "reasoning_content")
    return _chat(fmt, row, [*asked, said[0]], said[1:])


def _turns(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _history(value: Any) -> list[tuple[str, str]]:
    """Return the questions and answers of the turns before."""
    pairs = value or []
    is_pairs = isinstance(pairs, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)
    if not is_pairs:
        raise DataError(
            f"history is a list of [question, answer] pairs, got {shortened(value)}. Write the turns before as pairs, "
            "or the rows as messages."
        )
    return [(text_in(question, "history"), text_in(answer, "history")) for question, answer in pairs]


def _alpaca_prompt(instruction: str, context: str, system: str, earlier: list[tuple[str, str]]) -> str:
    """Return the prompt that the Stanford Alpaca models were trained on, with or without an input.

    A system prompt replaces its first sentences, and earlier turns are written as the last one is: LLaMA-Factory's way.
    """
    opening = system or (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request."
        if context.strip()
        else "Below is an instruction that describes a task. "
        "Write a response that appropriately completes the request."
    )
    before = "".join(f"### Instruction:\n{asked}\n\n### Response:\n{said}\n\n" for asked, said in earlier)
    further = f"### Input:\n{context}\n\n" if context.strip() else ""
    return f"{opening}\n\n{before}### Instruction:\n{instruction}\n\n{further}### Response:\n"


def _read_text(fmt: ExampleFormat, row: Row) -> Example | None:
    (column,) = fmt.columns
    text = text_in(row.get(column), column)
    return Document(text) if text.strip() else None


def _read_tokens(fmt: ExampleFormat, row: Row) -> Example:
    return read_tokens(row)


_READERS: dict[FormatName, Callable[[ExampleFormat, Row], Example | None]] = {
    "messages": _read_messages,
    "conversations": _read_messages,
    "prompt_completion": _read_prompt_completion,
    "alpaca": _read_alpaca,
    "text": _read_text,
    "tokens": _read_tokens,
}


def _with_system_prompt(messages: list[Message], system_prompt: str | None) -> list[Message]:
    if system_prompt is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]
