"""The longest rows that fit: in words, and the lengths that were tried."""

from __future__ import annotations

from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.planning.estimator.longest_rows import LongestRows
from lowmem_ft.reports.text.document import Table


def length_words(found: LongestRows) -> str:
    """Return the longest rows that fit, as a sentence."""
    if not found.tokens:
        return (
            f"Rows of {found.over_tokens:,} tokens do not fit{_lacking(found)}, and no shorter ones were found that "
            "do. Raise that memory, or let `lowmem-ft plan` look for settings that fit."
        )
    if found.over_tokens is None:
        is_longest = found.tokens >= found.most_tokens
        rest = (
            ", the longest that the model takes with these settings"
            if is_longest
            else "; no longer ones were tried"
        )
        return f"Rows of {found.tokens:,} tokens fit{rest}."
    why = _lacking(found) if found.over_host_bytes else ""
    over = f"rows of {found.over_tokens:,} were estimated not to fit, or may not{why}"
    return f"Rows of {found.tokens:,} tokens fit; {over}."


def _lacking(found: LongestRows) -> str:
    """Return which memory the rows that do not fit lack, in parentheses; empty where it is not known."""
    lacks = (
        f"{format_bytes(size)} of {name} memory"
        for name, size in (("device", found.over_device_bytes), ("host", found.over_host_bytes))
        if size
    )
    words = " and ".join(lacks)
    return f" (up to {words} too little)" if words else ""


def length_table(found: LongestRows) -> Table:
    """Return the lengths that were tried, with the upper end of the process's peak."""
    rows = [[f"{tokens:,}", format_bytes(size)] for tokens, size in found.process_bytes]
    return Table(("tokens of a row", "upper end of the peak"), rows, left=())
