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
=================  ===============================  ==================================================================

If columns match several formats, the one higher in the table wins; an Alpaca file may have a ``text`` column. An
example with nothing in a field it needs (null, blank, no turns) is left out and counted; one of the wrong structure is
an error that names it.

Chats also take a ``system`` column, for those without a system message, and ``tools``; Alpaca takes ``system``, the
earlier turns in ``history`` and the answer's ``reasoning_content``. All other columns are not used (unused_fields.py).
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from lowmem_ft.data.config import DataConfig, FormatName, LossOn
from lowmem_ft.data.text.tools import read_calls, read_tools
from lowmem_ft.foundation.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from lowmem_ft.data.text.chat_templates import Message

logger = logging.getLogger(__name__)

Row: TypeAlias = dict[str, Any]

SYSTEM, HISTORY = ("system", "system_prompt"), ("history",)
TOOLS, REASONING = ("tools", "functions"), ("reasoning_content", "reasoning", "thinking")
"""Columns with more about an example, by the names that other tools give them; the first one with a value is read."""


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


@dataclass(frozen=True, kw_only=True)
class ExampleFormat:
    """Reader of an example from a row.

    Args:
        name: one of the formats in the table above.
        columns: the required columns, in the order in which the format's reader takes them.
        system_prompt: system message for chats without one, or None.
        has_chat_template: whether Alpaca examples become chats.
    """

    name: FormatName
    columns: tuple[str, ...]
    system_prompt: str | None = None
    has_chat_template: bool = True

    def is_chat(self, row: Row) -> bool:
        """Return whether a chat template is to render the example in a row."""
        if self.name == "prompt_completion":
            return isinstance(row.get(self.columns[0]), list)
        return self.name in ("messages", "conversations") or (
            self.name == "alpaca" and self.has_chat_template
        )

    def further_columns(self, row: Row) -> tuple[str, ...]:
        """Return the columns that it reads in addition to the required ones, where a row has them."""
        if self.name == "alpaca":
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
        return _READERS[self.name](self, row)


def recognise_format(
    config: DataConfig, columns: Sequence[str], *, has_chat_template: bool, source: str
) -> ExampleFormat:
    """Return the format that the recipe requests, or else the one that the columns show; logged with the reason.

    Args:
        config: ``format`` and the ``*_column`` overrides.
        columns: the columns seen.
        has_chat_template: whether the tokenizer has a chat template.
        source: where the columns were seen, for messages.

    Returns:
        The format, with its columns.

    Raises:
        DataError: if overrides contradict each other, a named column is absent, no format matches, or raw text is
            to have its answers learnt.
    """
    name, reason, wanted = choose_format(config, columns, source)
    logger.info("Format of %s: %s (%s).", source, name, reason)
    return ExampleFormat(
        name=name,
        columns=tuple(wanted.values()),
        system_prompt=config.system_prompt,
        has_chat_template=has_chat_template,
    )


def choose_format(
    config: DataConfig, columns: Sequence[str], source: str
) -> tuple[FormatName, str, dict[str, str]]:
    """Return the format, the reason for it, and its columns by their settings; see :func:`recognise_format`."""
    name, reason = _choose_format(config, columns, source)
    wanted = _columns_of(name, config, columns)
    missing = {key: column for key, column in wanted.items() if column not in columns}
    if missing:
        raise DataError(
            *(_absent_column(key, column, name, columns, source) for key, column in missing.items())
        )
    if len(set(wanted.values())) < len(wanted):
        parts = ", ".join(f"data.{key}={column}" for key, column in wanted.items())
        raise DataError(
            f"The format {name} takes its parts from different columns, got {parts}. Columns of {source}: "
            f"{', '.join(columns)}."
        )
    if name == "text" and config.loss_on not in ("auto", "all"):
        raise DataError(
            f"data.loss_on={config.loss_on} needs examples with a prompt and an answer, got the format text. "
            "Set data.loss_on=all."
        )
    return name, reason, wanted


@contextlib.contextmanager
def naming_example(sample_id: int, source: str) -> Iterator[None]:
    """Add to an error about a row which row it is."""
    try:
        yield
    except DataError as error:
        raise DataError(
            *(f"Example {sample_id} of {source}: {problem}" for problem in error.problems)
        ) from error


def choose_loss_on(config: DataConfig, example_format: ExampleFormat) -> LossOn:
    """Choose the tokens to learn, with ``auto`` decided by the format and logged.

    Args:
        config: ``loss_on`` is the recipe's choice.
        example_format: the format of the data.

    Returns:
        The choice.
    """
    chosen = _loss_on_of(config, example_format.name)
    if config.loss_on == "auto":
        logger.info("Loss on: %s (data.loss_on=auto, format %s).", chosen, example_format.name)
    return chosen


def _loss_on_of(config: DataConfig, name: FormatName) -> LossOn:
    """Return which tokens of a format are learnt."""
    if config.loss_on != "auto":
        return config.loss_on
    by_format: dict[str, LossOn] = {"messages": "assistant", "conversations": "assistant", "text": "all"}
    return by_format.get(name, "completion")


_COLUMN_BY_DEFAULT: dict[FormatName, dict[str, str]] = {
    "messages": {"messages_column": "messages"},
    "conversations": {"messages_column": "conversations"},
    "prompt_completion": {"prompt_column": "prompt", "completion_column": "completion"},
    "alpaca": {"prompt_column": "instruction", "completion_column": "output"},
    "text": {"text_column": "text"},
}
_LISTED = "; ".join(f"{name} ({', '.join(needed.values())})" for name, needed in _COLUMN_BY_DEFAULT.items())
_KNOWN_FORMATS = f"Supported formats: {_LISTED}."
_FORMAT_OF_OVERRIDE: dict[str, FormatName] = {
    "messages_column": "messages",
    "prompt_column": "prompt_completion",
    "completion_column": "prompt_completion",
    "text_column": "text",
    "input_column": "alpaca",
}


def _choose_format(config: DataConfig, columns: Sequence[str], source: str) -> tuple[FormatName, str]:
    overrides = [key for key in _FORMAT_OF_OVERRIDE if getattr(config, key) is not None]
    if config.format != "auto":
        used = {*_COLUMN_BY_DEFAULT[config.format], *(["input_column"] if config.format == "alpaca" else [])}
        foreign = [f"data.{key}" for key in overrides if key not in used]
        if foreign:
            raise DataError(
                f"data.format={config.format} does not use {' or '.join(foreign)}. Set it to null, or data.format=auto."
            )
        return config.format, "data.format"
    named: set[FormatName] = {_FORMAT_OF_OVERRIDE[key] for key in overrides}
    if named == {"alpaca", "prompt_completion"}:  # an input column makes it Alpaca's
        named = {"alpaca"}
    if len(named) > 1:
        raise DataError(
            f"{' and '.join(f'data.{key}' for key in overrides)} belong to different formats "
            f"({', '.join(sorted(named))}). Set those of one format only."
        )
    if named:
        return named.pop(), f"by data.{overrides[0]}"
    for name, needed in _COLUMN_BY_DEFAULT.items():
        if set(needed.values()) <= set(columns):
            if name == "conversations" and are_preferences(columns):
                raise DataError(
                    f"{holds_preferences(columns, source)} To learn only the chosen answers, append them to the "
                    "conversations, without the columns chosen and rejected."
                )
            return name, f"recognised from the columns {', '.join(needed.values())}"
    raise DataError(_unknown_format(columns, source))


def are_preferences(columns: Collection[str]) -> bool:
    """Return whether rows are preferences between two answers, in the columns of TRL's DPO or of OpenAI's."""
    return any(set(names) <= set(columns) for names in _PREFERENCES)


def holds_preferences(columns: Sequence[str], source: str) -> str:
    """Return what is wrong with preferences if answers are to be learnt, and what learns from them."""
    return (
        f"{source} holds preferences (columns seen: {', '.join(columns)}), and training here is supervised: it learns "
        "answers, not which of two is better. Use TRL's DPOTrainer, which takes the same recipe through lowmem_ft.hf."
    )


def judged_answers(row: Row) -> str | None:
    """Return what is wrong with a row of KTO's if answers are to be learnt, and what learns from it; None for others.

    Args:
        row: values by column. TRL's rows have a ``label`` next to a completion, LLaMA-Factory's a ``kto_tag``; a label
            that is neither true nor false, such as the name of a class, judges nothing.
    """
    for name in ("label", "kto_tag"):
        value = row.get(name)
        is_number = value in (0, 1) and (name == "kto_tag" or "completion" in row)
        if isinstance(value, bool) or is_number or str(value).strip().lower() in ("true", "false"):
            return (
                f"{name}={str(value).lower()} judges the answer (KTO: true is a good one, false a bad one), and "
                "training here is supervised: good and bad answers would be learnt alike. Use TRL's KTOTrainer, with "
                "the rows of lowmem_ft.hf.load_rows. To learn only the good answers, leave out the rows of bad ones "
                f"and the column {name}."
            )
    return None


_PREFERENCES = (("chosen", "rejected"), ("preferred_output", "non_preferred_output"))
_OTHER_KINDS = {
    (
        "prompt",
        "completions",
        "labels",
    ): "answers whose steps were judged one by one, as TRL's PRM trainer learns",
    ("input_ids",): "tokens in place of text",
    ("segments",): "the segments of axolotl's input_output, each with a label of its own",
    ("contents",): "the contents of Google's format",
}
"""Kinds of data that are not read, by their columns."""

_QUESTIONS = ("question", "instruction", "query", "problem", "input", "prompt")
_ANSWERS = ("answer", "response", "output", "solution", "completion", "target")


def _unknown_format(columns: Sequence[str], source: str) -> str:
    """Return the columns seen, the formats known, and settings for these columns if their names are telling."""
    if are_preferences(columns):
        chosen = next(name for name, other in _PREFERENCES if {name, other} <= set(columns))
        prompt = f"data.prompt_column=prompt data.completion_column={chosen}"
        way_out = prompt if "prompt" in columns else f"data.messages_column={chosen}"
        return f"{holds_preferences(columns, source)} To learn only the chosen answers, set {way_out}."
    for names, kind in _OTHER_KINDS.items():
        if set(names) <= set(columns):
            return (
                f"{source} holds {kind}, which lowmem_ft does not read. Columns seen: {', '.join(columns)}. "
                f"{_KNOWN_FORMATS}"
            )
    question, answer = _first_of(_QUESTIONS, columns), _first_of(_ANSWERS, columns)
    pair = f"data.prompt_column={question} data.completion_column={answer}"
    further = " data.input_column=context" if "context" in columns else ""
    return (
        f"No supported format has the columns of {source}. Columns seen: {', '.join(columns)}. {_KNOWN_FORMATS} Name "
        f"the columns: `data.format=alpaca {pair}{further}` turns them into chats, `{pair}` joins them unchanged, "
        "`data.text_column=body` reads raw text."
        + (_HEADER_IS_NEEDED if ".csv" in source.lower() or ".tsv" in source.lower() else "")
    )


_HEADER_IS_NEEDED = " A CSV file needs a header line; otherwise its first row is read as column names."


def _first_of(names: Sequence[str], columns: Sequence[str]) -> str:
    """Return the first of some telling names that a column has, as spelt there; the most common if none has."""
    spelt = {column.strip().lower(): column for column in columns}
    return next((spelt[name] for name in names if name in spelt), names[0])


def _columns_of(name: FormatName, config: DataConfig, columns: Sequence[str]) -> dict[str, str]:
    wanted = {key: getattr(config, key) or column for key, column in _COLUMN_BY_DEFAULT[name].items()}
    if name == "alpaca" and (config.input_column or "input" in columns):
        wanted["input_column"] = config.input_column or "input"
    return wanted


def _absent_column(key: str, column: str, name: str, columns: Sequence[str], source: str) -> str:
    return (
        f"data.{key} of the format {name} is {column}, which {source} does not have. "
        f"Columns seen: {', '.join(columns)}.{did_you_mean(column, columns)}"
    )


def _read_messages(fmt: ExampleFormat, row: Row) -> Example | None:
    (column,) = fmt.columns
    messages = _messages(row.get(column), column)
    return _chat(fmt, row, messages) if messages else None


def _chat(fmt: ExampleFormat, row: Row, asked: list[Message], answered: list[Message] | None = None) -> Chat:
    """Return a chat with its row's system message and tools; with an answer, what comes before that is the prompt."""
    system = fmt.further(row, SYSTEM)
    asked = _with_system_prompt(asked, fmt.system_prompt if system is None else _text(system, "system"))
    tools = read_tools(fmt.further(row, TOOLS), "tools")
    return Chat(asked + (answered or []), None if answered is None else len(asked), tools)


def _read_prompt_completion(fmt: ExampleFormat, row: Row) -> Example | None:
    prompt, completion = (row.get(column) for column in fmt.columns)
    if isinstance(prompt, list) and isinstance(completion, list):
        asked, answered = (_messages(row.get(column), column) for column in fmt.columns)
        return _chat(fmt, row, asked, answered) if asked and answered else None
    if isinstance(prompt, list) != isinstance(completion, list) and None not in (prompt, completion):
        raise DataError(
            f"{' and '.join(fmt.columns)} are both text or both lists of messages, got {_seen(prompt)} and "
            f"{_seen(completion)}. Use the same type for both."
        )
    texts = [_text(row.get(column), column) for column in fmt.columns]
    return Completion(*texts) if all(text.strip() for text in texts) else None


def _read_alpaca(fmt: ExampleFormat, row: Row) -> Example | None:
    instruction, output = (_text(row.get(column), column) for column in fmt.columns[:2])
    context = "".join(_text(row.get(column), column) for column in fmt.columns[2:])
    if not instruction.strip() or not output.strip():
        return None
    earlier = _history(fmt.further(row, HISTORY))
    if not fmt.has_chat_template:
        system = _text(fmt.further(row, SYSTEM), "system")
        return Completion(_alpaca_prompt(instruction, context, system, earlier), output)
    question = f"{instruction}\n\n{context}" if context.strip() else instruction
    asked = [message for pair in earlier for message in _turns(*pair)]
    said = _turns(question, output)
    if (reasoning := fmt.further(row, REASONING)) is not None:
        said[1]["reasoning_content"] = _text(reasoning, "reasoning_content")
    return _chat(fmt, row, [*asked, said[0]], said[1:])


def _turns(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _history(value: Any) -> list[tuple[str, str]]:
    """Return the questions and answers of the turns before."""
    pairs = value or []
    is_pairs = isinstance(pairs, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)
    if not is_pairs:
        raise DataError(
            f"history is a list of [question, answer] pairs, got {_seen(value)}. Write the turns before as pairs, or "
            "the rows as messages."
        )
    return [(_text(question, "history"), _text(answer, "history")) for question, answer in pairs]


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
    text = _text(row.get(column), column)
    return Document(text) if text.strip() else None


_READERS: dict[FormatName, Callable[[ExampleFormat, Row], Example | None]] = {
    "messages": _read_messages,
    "conversations": _read_messages,
    "prompt_completion": _read_prompt_completion,
    "alpaca": _read_alpaca,
    "text": _read_text,
}

_ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "ipython",
    "function_call": "assistant",
    "tool_call": "assistant",
}
_ROLES_OF_CALLS = ("function_call", "tool_call")
"""Roles in LLaMA-Factory's ShareGPT of a turn in which the assistant calls a tool: its text is the call in JSON."""

_CALLS = ("tool_calls", "function_call")
_SAYING = ("content", "value", *_CALLS)
"""Keys that hold a message's content; Arrow gives it every key that another message of the data has."""


def _messages(value: Any, column: str) -> list[Message] | None:
    """Return the turns in a column; None if it is empty, or one of its turns is."""
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise DataError(
            f"{column} is a list of messages such as {{'role': 'user', 'content': 'Hi'}}, got {_seen(value)}."
        )
    messages = [_message(message, column) for message in value]
    spoken = all(message["content"].strip() or message.get("tool_calls") for message in messages)
    return messages if messages and spoken else None


def _message(raw: Row, column: str) -> Message:
    # Arrow fills a key that only other messages have with null; templates check whether it is defined.
    message = {key: value for key, value in raw.items() if value is not None}
    named = message.pop("role", None) or message.pop("from", None)
    role = named.lower() if isinstance(named, str) else None
    if role not in _ROLES:
        raise DataError(
            f"{column}: the role of a message is one of {', '.join(_ROLES)}, got {_seen(named)}"
            f"{'' if named is not None else f' in {_seen(raw)}'}.{did_you_mean(role or '', _ROLES)} Rename it."
        )
    _check_marks(message, column)
    if raw.keys().isdisjoint(_SAYING):
        raise DataError(
            f"{column}: a message has its text under {', '.join(_SAYING[:-1])} or {_SAYING[-1]}, got one with the "
            f"keys {', '.join(map(str, raw))}.{_misspelt(raw)} Rename the key that holds the text."
        )
    content = message.pop("content", None)
    content = message.pop("value", None) if content is None else content
    calls = message.pop("function_call", None)
    calls = message.pop("tool_calls", None) or calls
    if role in _ROLES_OF_CALLS and not calls:
        calls, content = content, ""
    with_calls = {"tool_calls": read_calls(calls, column)} if calls else {}
    return {"role": _ROLES[role], "content": _content(content, column), **with_calls, **message}


def _check_marks(message: Row, column: str) -> None:
    """Refuse a mark of the wrong type, which would be ignored; marks (``weight``, ``train``) say what is learnt."""
    weight = message.get("weight", 1)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
        raise DataError(
            f"{column}: the weight of a message must be 0 (it is not learnt) or 1, got {_seen(weight)}. Write 0 or 1."
        )
    for name in ("train", "training", "loss"):
        if not isinstance(mark := message.get(name, True), bool):
            raise DataError(
                f"{column}: {name} says whether a message is learnt, true or false, got {_seen(mark)}. Write it "
                "without quotes."
            )


def _misspelt(raw: Row) -> str:
    return next((hint for key in raw if (hint := did_you_mean(str(key), _SAYING))), "")


def _content(content: Any, column: str) -> str:
    """Return the content of a message; the multi-part form is accepted if all parts are text."""
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and "text" in part for part in content
    ):
        return "".join(_text(part.get("text"), column) for part in cast(list[Row], content))
    if isinstance(content, list):
        kinds = [part.get("type") for part in content if isinstance(part, dict)]
        if other := next((kind for kind in kinds if kind is not None and kind != "text"), None):
            raise DataError(
                f"{column}: lowmem_ft trains on text, got a message with a part of type {_seen(other)}, which the "
                "model would not see. Leave those chats out, or remove the part if the text needs none."
            )
    return _text(content, f"The content of a message in {column}")


def _text(value: Any, column: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(
            f"{column} is text, got {type(value).__name__}: {_seen(value)}. Convert it to a string."
        )
    return value


def _seen(value: Any, limit: int = 100) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "..."


def _with_system_prompt(messages: list[Message], system_prompt: str | None) -> list[Message]:
    if system_prompt is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]
