"""Messages of chats, in the spellings of other tools' files, as chat templates take them."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, cast

from lowmem_ft.data.text.examples import Row
from lowmem_ft.data.text.tool_calls import read_calls, shortened
from lowmem_ft.foundation.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from lowmem_ft.data.text.chat_templates import Message


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


def raw_messages(value: Any) -> Any:
    """Return the value of a column of messages; JSON text, as in a CSV file, is parsed.

    Text of anything else than a list stays as it is.
    """
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def messages_in(value: Any, column: str) -> list[Message] | None:
    """Return the turns in a column; None if it is empty, or one of its turns is."""
    raw = raw_messages(value)
    if raw is None or (isinstance(raw, str) and not raw.strip()):
        return None
    if not isinstance(raw, list) or not all(isinstance(message, dict) for message in raw):
        written = isinstance(raw, str) and raw.lstrip().startswith("[")
        raise DataError(
            f"{column} is a list of messages such as {{'role': 'user', 'content': 'Hi'}}, or JSON text of one, got "
            f"{shortened(value)}." + (" That is no JSON: write it with json.dumps." if written else "")
        )
    messages = [_message(message, column) for message in raw]
    spoken = all(message["content"].strip() or message.get("tool_calls") for message in messages)
    return messages if messages and spoken else None


def _message(raw: Row, column: str) -> Message:
    # Arrow fills a key that only other messages have with null; templates check whether it is defined.
    message = {key: value for key, value in raw.items() if value is not None}
    named = message.pop("role", None) or message.pop("from", None)
    role = named.lower() if isinstance(named, str) else None
    if role not in _ROLES:
        raise DataError(
            f"{column}: the role of a message is one of {', '.join(_ROLES)}, got {shortened(named)}"
            f"{'' if named is not None else f' in {shortened(raw)}'}.{did_you_mean(role or '', _ROLES)} Rename it."
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
            f"{column}: the weight of a message must be 0 (it is not learnt) or 1, got {shortened(weight)}. "
            "Write 0 or 1."
        )
    for name in ("train", "training", "loss"):
        if not isinstance(mark := message.get(name, True), bool):
            raise DataError(
                f"{column}: {name} says whether a message is learnt, true or false, got {shortened(mark)}. Write it "
                "without quotes."
            )


def _misspelt(raw: Row) -> str:
    return next((hint for key in raw if (hint := did_you_mean(str(key), _SAYING))), "")


def _content(content: Any, column: str) -> str:
    """Return the content of a message; the multi-part form is accepted if all parts are text."""
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and "text" in part for part in content
    ):
        return "".join(text_in(part.get("text"), column) for part in cast(list[Row], content))
    if isinstance(content, list):
        kinds = [part.get("type") for part in content if isinstance(part, dict)]
        if other := next((kind for kind in kinds if kind is not None and kind != "text"), None):
            raise DataError(
                f"{column}: lowmem_ft trains on text, got a message with a part of type {shortened(other)}, which the "
                "model would not see. Leave those chats out, or remove the part if the text needs none."
            )
    return text_in(content, f"The content of a message in {column}")


def text_in(value: Any, column: str) -> str:
    """Return a field's text, empty if it is null; anything else is an error."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(
            f"{column} is text, got {type(value).__name__}: {shortened(value)}. Convert it to a string."
        )
    return value
