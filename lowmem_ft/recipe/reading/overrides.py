"""``key=value`` settings of the command line, as nested values."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lowmem_ft.recipe.reading.ambiguous_numbers import ambiguity, ambiguous_numbers
from lowmem_ft.recipe.reading.foreign_keys import FOREIGN_KEYS
from lowmem_ft.recipe.reading.keys import (
    SHORT_FORMS,
    describe_type,
    keys_meant_by,
    not_a_group,
    recipe_groups,
    recipe_keys,
    unknown_key,
    without_none,
)

logger = logging.getLogger(__name__)

SHOWN_CHARACTERS = 200
"""The most characters of a value that an error shows."""


def parse_overrides(overrides: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the settings as nested values, and one problem for each that is not ``key=value``.

    Args:
        overrides: settings such as ``training.learning_rate=1e-5``; if a key occurs twice, the later value wins, with a
            warning if they differ.

    Returns:
        The nested values, and the problems.
    """
    settings: dict[str, Any] = {}
    problems: list[str] = []
    texts: dict[str, str] = {}
    for written in _join_dashed(overrides):
        key, equals, text = written.partition("=")
        if not equals or not key or key.startswith("-"):
            problems.append(_not_key_value(written))
            continue
        path = SHORT_FORMS.get(key, key)
        if path in recipe_groups():
            problems.append(not_a_group(path, text))
            continue
        try:
            _set(settings, path.split("."), _parse(path, text))
            problems += [f"{path}={text}: {ambiguity(word)}" for word in _ambiguous_in(path, text)]
        except (yaml.YAMLError, OmegaConfBaseException, RecursionError):
            problems.append(_unreadable(path, text))
        if texts.setdefault(path, text) != text:
            logger.warning("%s is set twice, to %s and to %s; %s counts.", path, texts[path], text, text)
            texts[path] = text
    return settings, problems


def _join_dashed(overrides: Iterable[str]) -> list[str]:
    """Join ``--key value``, as other programs take it, into one piece: one mistake, one message."""
    joined: list[str] = []
    for written in overrides:
        after_dashed = joined and joined[-1].startswith("-") and not {"=", " "} & set(joined[-1])
        if after_dashed and "=" not in written and not written.startswith("-"):
            joined[-1] += f" {written}"
        else:
            joined.append(written)
    return joined


def _not_key_value(written: str) -> str:
    rule = f"A setting is written key=value, got `{written}`."
    words = written.lstrip("-").replace("=", " ", 1).split(" ", 1)
    path = SHORT_FORMS.get(words[0], words[0].replace("-", "_"))
    meant = [path] if path in recipe_keys() else keys_meant_by(path)
    value = words[1] if len(words) == 2 else "VALUE"
    if meant:
        return f"{rule} Write {' or '.join(f'{key}={value}' for key in meant)}."
    return f"{rule} {unknown_key(path)}" if path in FOREIGN_KEYS else rule


def _unreadable(path: str, text: str) -> str:
    key = recipe_keys().get(path)
    shown = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
    return f"{path} must be {describe_type(key.type_hint)}; got {shown}." if key else unknown_key(path, shown)


def _parse(path: str, text: str) -> Any:
    """Return the value as the key's type reads it: text stays as typed, the rest is YAML; ``${...}`` is the shell's."""
    key = recipe_keys().get(path)
    is_mapping = key is not None and key.takes_choices_by_name and text.lstrip().startswith("{")
    takes_text = key is not None and bool(key.choices or without_none(key.type_hint) is str)
    if takes_text and text != "null" and not is_mapping:
        if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
            logger.warning(
                "%s=%s: the quotes are part of the value, as text is taken as it is typed; leave them out if they are "
                "not.",
                path,
                text,
            )
        return text
    parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
    assert isinstance(parsed, dict)
    return parsed["value"]


def _ambiguous_in(path: str, text: str) -> list[str]:
    key = recipe_keys().get(path)
    is_text = key is not None and without_none(key.type_hint) is str
    return [] if is_text else [word for _, word in ambiguous_numbers(text)]


def _set(settings: dict[str, Any], parts: list[str], value: Any) -> None:
    for part in parts[:-1]:
        inner = settings.get(part)
        settings[part] = inner if isinstance(inner, dict) else {}
        settings = settings[part]
    settings[parts[-1]] = value
