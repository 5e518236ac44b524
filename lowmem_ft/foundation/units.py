"""Byte sizes as text and back: the code uses ints of bytes everywhere, and text such as ``24GiB`` only at the edges."""

from __future__ import annotations

import re

from lowmem_ft.foundation.errors import UserError

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
}


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as ``24GiB`` (2**30), ``24GB`` (10**9) or ``512B``.

    Raises:
        UserError: if the text is not a positive number followed by a known unit; a bare number could mean anything.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*", text) if isinstance(text, str) else None
    unit = _UNITS.get(match[2].lower()) if match else None
    size = round(float(match[1]) * unit) if match and unit else 0
    if size <= 0:
        raise UserError(
            f"A size is a positive number and a unit, such as 24GiB, 24GB or 512MiB; got {text!r}."
        )
    return size


def counted(number: int, one: str, many: str | None = None) -> str:
    """Format a number with its noun: ``1 example``, ``8 examples``."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def format_bytes(num_bytes: int) -> str:
    """Format a size for people, in binary units with three or four digits: ``1.50 GiB``, ``12.3 MiB``, ``800 B``."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):  # noqa: B007
        if abs(size) < 1024:
            break
        size /= 1024
    else:
        unit = "TiB"
    if unit == "B":
        return f"{num_bytes} B"
    digits = 2 if abs(size) < 10 else 1 if abs(size) < 100 else 0
    return f"{size:.{digits}f} {unit}"
