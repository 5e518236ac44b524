"""Numbers that YAML 1.1, which PyYAML reads, and YAML 1.2 read differently: 8 or 10 for ``010``."""

from __future__ import annotations

import re
from collections.abc import Iterator

import yaml

_OCTAL = re.compile(r"[-+]?0[0-7_]*[0-7]")
_BASE_60 = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")


def ambiguous_numbers(text: str) -> Iterator[tuple[int, str]]:
    """Yield each such number of a YAML document that is not in quotes, with its line.

    Raises:
        yaml.YAMLError: if the text is not YAML.
    """
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.ScalarEvent) and event.style is None and _is_ambiguous(event.value):
            yield event.start_mark.line + 1, event.value


def _is_ambiguous(word: str) -> bool:
    """Return whether a word is a number with a leading 0, or in base 60."""
    return bool(_OCTAL.fullmatch(word) or _BASE_60.fullmatch(word))


def ambiguity(word: str) -> str:
    """Return the sentence about such a number, without its place."""
    if ":" in word:
        return (
            f"{word} is a number in base 60 to YAML 1.1, and text to YAML 1.2. Write the number, or quote it."
        )
    return (
        f"{word} is {int(word, 8)} to YAML 1.1, and {int(word)} to YAML 1.2. Write it without the leading 0."
    )
