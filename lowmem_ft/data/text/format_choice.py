"""The format of a user's rows, by the recipe's settings or by their columns, and what is learnt of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from lowmem_ft.data.config import DataConfig, FormatName, LossOn
from lowmem_ft.data.text.formats import ExampleFormat
from lowmem_ft.data.text.other_kinds import OTHER_KINDS, PREFERENCES, are_preferences, holds_preferences
from lowmem_ft.data.text.token_rows import IDS, LABELS, problem_with_columns
from lowmem_ft.foundation.errors import DataError, did_you_mean, raise_problems

logger = logging.getLogger(__name__)


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
    others = other_formats(tuple(wanted.values()), columns)
    if (IDS,) in others:
        logger.info(
            "%s has tokens, too, and its text is read. For the tokens, set data.format=tokens.", source
        )
    return ExampleFormat(
        name=name,
        columns=tuple(wanted.values()),
        system_prompt=config.system_prompt,
        has_chat_template=has_chat_template,
        others=others,
    )


def other_formats(used: Sequence[str], columns: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return the columns of each format that are all there and none of which is used."""
    groups = (tuple(needed.values()) for needed in _COLUMN_BY_DEFAULT.values())
    return tuple(group for group in groups if set(group) <= set(columns) - set(used))


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
    if name == "tokens":
        raise_problems(_problems_of_tokens(config, columns, source), DataError)
    return name, reason, wanted


def _problems_of_tokens(config: DataConfig, columns: Sequence[str], source: str) -> Iterator[str]:
    """Yield what rows of tokens cannot do."""
    if problem := problem_with_columns(columns, source):
        yield problem
    if config.loss_on not in (("auto",) if LABELS in columns else ("auto", "all")):
        yield (
            f"data.loss_on={config.loss_on} chooses among the parts of a text, and {source} holds tokens, whose "
            f"{LABELS} say what is learnt. Set data.loss_on=auto."
        )
    if config.system_prompt is not None:
        yield (
            f"data.system_prompt is for chats, and {source} holds tokens, which are taken as they are. Set "
            "data.system_prompt=null."
        )


def choose_loss_on(config: DataConfig, example_format: ExampleFormat) -> LossOn:
    """Choose the tokens to learn, with ``auto`` decided by the format and logged.

    Args:
        config: ``loss_on`` is the recipe's choice.
        example_format: the format of the data.

    Returns:
        The choice.
    """
    chosen = _loss_on_of(config, example_format.name)
    if example_format.name == "tokens":
        logger.info("Loss on: the rows' labels, or each token where there are no labels.")
    elif config.loss_on == "auto":
        logger.info("Loss on: %s (data.loss_on=auto, format %s).", chosen, example_format.name)
    return chosen


def _loss_on_of(config: DataConfig, name: FormatName) -> LossOn:
    """Return which tokens of a format are learnt."""
    if config.loss_on != "auto":
        return config.loss_on
    by_format: dict[str, LossOn] = {"messages": "assistant", "conversations": "assistant", "text": "all"}
    by_format["tokens"] = "all"  # of what their labels say
    return by_format.get(name, "completion")


_COLUMN_BY_DEFAULT: dict[FormatName, dict[str, str]] = {
    "messages": {"messages_column": "messages"},
    "conversations": {"messages_column": "conversations"},
    "prompt_completion": {"prompt_column": "prompt", "completion_column": "completion"},
    "alpaca": {"prompt_column": "instruction", "completion_column": "output"},
    "text": {"text_column": "text"},
    "tokens": {IDS: IDS},
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


_QUESTIONS = ("question", "instruction", "query", "problem", "input", "prompt")
_ANSWERS = ("answer", "response", "output", "solution", "completion", "target")


def _unknown_format(columns: Sequence[str], source: str) -> str:
    """Return the columns seen, the formats known, and settings for these columns if their names are telling."""
    if are_preferences(columns):
        chosen = next(name for name, other in PREFERENCES if {name, other} <= set(columns))
        prompt = f"data.prompt_column=prompt data.completion_column={chosen}"
        way_out = prompt if "prompt" in columns else f"data.messages_column={chosen}"
        return f"{holds_preferences(columns, source)} To learn only the chosen answers, set {way_out}."
    for names, kind in OTHER_KINDS.items():
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
    wanted = {key: getattr(config, key, None) or column for key, column in _COLUMN_BY_DEFAULT[name].items()}
    if name == "alpaca" and (config.input_column or "input" in columns):
        wanted["input_column"] = config.input_column or "input"
    return wanted


def _absent_column(key: str, column: str, name: str, columns: Sequence[str], source: str) -> str:
    if name == "tokens":
        return (
            f"data.format=tokens reads the column {column}, which {source} does not have. Columns seen: "
            f"{', '.join(columns)}."
        )
    return (
        f"data.{key} of the format {name} is {column}, which {source} does not have. "
        f"Columns seen: {', '.join(columns)}.{did_you_mean(column, columns)}"
    )
