"""The longest rows that fit: in words, and the lengths that were tried."""

from __future__ import annotations

from lowmem_ft.estimator.longest_rows import LongestRows
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.reports.text.document import Table


def length_words(found: LongestRows) -> str:
    """Return the longest rows that fit, as a sentence."""
    if not found.tokens:
        return f"Rows of {found.over_tokens:,} tokens do not fit, and no shorter ones were found that do."
    if found.over_tokens is None:
        is_longest = found.tokens >= found.most_tokens
        rest = (
            ", the longest that the model takes with these settings"
            if is_longest
            else "; no longer ones were tried"
        )
        return f"Rows of {found.tokens:,} tokens fit{rest}."
    return f"Rows of {found.tokens:,} tokens fit; rows of {found.over_tokens:,} were estimated not to fit, or may not."


def length_table(found: LongestRows) -> Table:
    """Return the lengths that were tried, with the upper end of the process's peak."""
    rows = [[f"{tokens:,}", format_bytes(size)] for tokens, size in found.process_bytes]
    return Table(("tokens of a row", "upper end of the peak"), rows, left=())
