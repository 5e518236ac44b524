"""Tools and tool calls, in the spellings of other tools' files, as chat templates take them.

Templates take what OpenAI's API does: tools as ``{"type": "function", "function": {"name", "description",
"parameters"}}``, and calls in the ``tool_calls`` of an assistant message. Read are also JSON text in place of either,
functions without their wrapper (LLaMA-Factory's ``tools``, OpenAI's older ``functions``), the older ``function_call``
of a message, and LLaMA-Factory's turns from ``function_call``.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

from lowmem_ft.foundation.errors import DataError


def read_tools(value: Any, column: str) -> list[dict[str, Any]]:
    """Return the tools in a column.

    Args:
        value: a list of tools, or JSON text of one; None or empty: there are no tools.
        column: its name, for messages.

    Returns:
        Tools with their wrapper, without the nulls by which Arrow fills the fields of others.

    Raises:
        DataError: if it is neither.
    """
    tools = (
        _parsed(value, column, "a list of tools") if isinstance(value, str) and value.strip() else value or []
    )
    if isinstance(tools, dict):
        tools = [tools]
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(
            f"{column} is a list of tools, or JSON text of one, got {shortened(tools)}. Write each as "
            "{'type': 'function', 'function': {'name': ..., 'description': ..., 'parameters': {...}}}."
        )
    wrapped = [_wrapped(_without_nulls(tool)) for tool in tools]
    for tool in wrapped:
        if not isinstance(name := tool["function"].get("name"), str) or not name.strip():
            raise DataError(
                f"{column}: a tool has a name, got {shortened(tool)}. Add it, or leave the tool out."
            )
    return wrapped


def read_calls(value: Any, column: str) -> list[dict[str, Any]]:
    """Return the calls of an assistant turn, their arguments as mappings.

    Args:
        value: a call or a list of calls, with or without the wrapper, or JSON text of either.
        column: the column of messages, for messages.

    Raises:
        DataError: if a call has no name, or text is not JSON.
    """
    calls = _parsed(value, column, "a tool call") if isinstance(value, str) else value
    calls = calls if isinstance(calls, list) else [calls]
    wrapped = []
    for call in calls:
        call = _wrapped(_without_nulls(call)) if isinstance(call, dict) else {}
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(
                f"{column}: a tool call has a name and arguments, got {shortened(value)}. Write it as {{'name': ..., "
                "'arguments': {...}}."
            )
        arguments = function.get("arguments", {})
        if isinstance(arguments, str) and arguments.strip():
            arguments = _parsed(arguments, column, f"the arguments of {function['name']}")
        wrapped.append({**call, "function": {**function, "arguments": arguments or {}}})
    return wrapped


def with_arguments_as_text(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with the arguments of their calls as JSON text, which some templates (DeepSeek's) concatenate."""

    def as_text(function: dict[str, Any]) -> dict[str, Any]:
        return {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}

    return _with_functions(messages, as_text)


def with_unique_names(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose calls name functions that no text mentions by chance."""
    numbers = itertools.count()
    return _with_functions(
        messages, lambda function: {**function, "name": f"{function['name']}_zebra{next(numbers)}s"}
    )


def _with_functions(
    messages: list[dict[str, Any]], change: Callable[[dict[str, Any]], dict[str, Any]]
) -> list[dict[str, Any]]:
    return [
        {
            **message,
            "tool_calls": [{**call, "function": change(call["function"])} for call in message["tool_calls"]],
        }
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def writes_python(messages: list[dict[str, Any]], text: str) -> bool:
    """Return whether a template wrote arguments as Python does (``{'city': 'Paris'}``), which is not JSON."""
    every = [
        call["function"]["arguments"] for message in messages for call in message.get("tool_calls") or ()
    ]
    return any(str(arguments) in text for arguments in every if str(arguments) != json.dumps(arguments))


def names_of(tools_or_calls: list[dict[str, Any]]) -> list[str]:
    """Return the names of functions."""
    return [str(entry["function"].get("name", "")) for entry in tools_or_calls]


def is_described(tool: dict[str, Any], text: str) -> bool:
    """Return whether a text has a tool's name, what it does and its parameters, as they are or as JSON has them.

    A name alone may be there by chance: a question about the weather has the name ``weather``.
    """
    function = tool["function"]
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    description = str(function.get("description") or "")
    said = [*names_of([tool]), *map(str.strip, description.splitlines())]
    said += properties if isinstance(properties, dict) else []
    return all(part in text or json.dumps(part, ensure_ascii=False)[1:-1] in text for part in said)


def _without_nulls(value: Any) -> Any:
    """Return a value without the null fields of its mappings: Arrow gives each mapping the fields of all others."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _wrapped(entry: dict[str, Any]) -> dict[str, Any]:
    return entry if isinstance(entry.get("function"), dict) else {"type": "function", "function": entry}


def _parsed(text: str, column: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        raise DataError(
            f"{column}: {what} is JSON text, which cannot be read ({reason}): {shortened(text)}. Correct it, or leave "
            "that row out."
        ) from error


def shortened(value: Any) -> str:
    """Return a value as an error shows it."""
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "..."
