"""Keys of other toolkits, and what a recipe says instead.

One table, ``foreign_keys.json``, answers a foreign key in a recipe or on the command line, and is printed in
``docs/coming_from.md``. The names are those of the toolkits' example configs and config classes of November 2026
(transformers 5.23, TRL 1.16), and older ones that people still have in their files.

A row of the table is about keys of one meaning: their ``names`` and, as in :class:`ForeignKey`, ``ours``, ``note``,
``values`` and ``translated``. Keys that are true or false, where false is what a recipe has anyway, have the setting
for true as ``on``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

UNSAID: Any = object()
"""In the place of a value: only the key is asked about."""

LEAVE_OUT = ""
"""The setting for a value that a recipe has by default: nothing is written."""

_MOST_SHOWN = 60
"""The most characters of a value that are written out in an answer."""


@dataclass(frozen=True)
class ForeignKey:
    """A key of other toolkits.

    Args:
        name: its last part, as they write it.
        ours: the recipe key that it means; None: no recipe key means it.
        note: what to know about it; without ``ours``: what to do instead.
        values: the settings that its values mean, by the value as text; other values are ours as well, unless
            ``translated``.
        translated: whether a value that ``values`` does not name has to be written otherwise here.
    """

    name: str
    ours: str | None = None
    note: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    translated: bool = False

    @property
    def toolkits(self) -> list[str]:
        """The toolkits that have the key."""
        return [toolkit for toolkit, names in KEYS_OF.items() if self.name in names]

    def answer(self, path: str, value: Any = UNSAID) -> str:
        """Return the sentences about the key, as a user wrote it, and about its value.

        Args:
            path: the key as it was seen.
            value: its value, if there is one to speak of.
        """
        whose = f"{path} is a key of {', '.join(self.toolkits)}"
        if value is None:
            return f"{whose}. Without a value, leave it out."
        text = _as_text(value)
        if (setting := self.values.get(text.lower())) is not None:
            write = f"write `{setting}`" if setting else "leave it out"
            return f"{whose}. For {text}, {write}.{self._note()}"
        if self.ours is None:
            return f"{whose}, not of a recipe. {self.note}"
        if not text or self.translated or isinstance(value, (dict, list)) or len(text) > _MOST_SHOWN:
            return f"{whose}; in a recipe it is `{self.ours}`.{self._note()}"
        return f"{whose}; in a recipe, write `{self.ours}={text}`.{self._note()}"

    def knows(self, value: Any) -> bool:
        """Return whether the entry says what a value means."""
        return _as_text(value).lower() in self.values

    def _note(self) -> str:
        return f" {self.note}" if self.note else ""


def _as_text(value: Any) -> str:
    return "" if value is UNSAID else str(value).lower() if isinstance(value, bool) else str(value)


def _keys_of(row: dict[str, Any]) -> Iterator[ForeignKey]:
    """Yield the keys of one row of the table."""
    names, on = row.pop("names"), row.pop("on", None)
    if on is not None:
        row |= {"values": {"false": LEAVE_OUT, "true": on, "auto": on}, "translated": True}
    for name in names:
        yield ForeignKey(name, **row)


_TABLE = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))

KEYS_OF: Mapping[str, Sequence[str]] = _TABLE.pop("toolkits")
"""The keys of other toolkits that have an entry, by toolkit."""

FOREIGN_KEYS: Mapping[str, ForeignKey] = {
    key.name: key for rows in _TABLE.values() for row in rows for key in _keys_of(row)
}
