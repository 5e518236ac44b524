"""Columns of rows that are tokens already, known without numpy, which reads their values (token_rows.py)."""

from __future__ import annotations

from collections.abc import Collection

IDS, LABELS, MASK, POSITIONS = "input_ids", "labels", "attention_mask", "position_ids"

FURTHER = (LABELS, MASK, POSITIONS)
"""Columns that are read where they exist."""

_MASKS = ("completion_mask", "assistant_masks", "assistant_mask", "loss_mask")
_NOT_TOKENS = ("pixel_values", "pixel_values_videos", "image_grid_thw", "input_features", "input_values")


def problem_with_columns(columns: Collection[str], source: str) -> str | None:
    """Return why rows of tokens with these columns cannot be learnt as they are meant; None if they can."""
    if "seq_lengths" in columns:
        return (
            f"Each row of tokens is one document, and those of {source} hold several (seq_lengths). Write them before "
            "they are packed; data.packing=true packs them."
        )
    if others := [name for name in _NOT_TOKENS if name in columns]:
        return (
            f"lowmem_ft trains on text, and {source} has {', '.join(others)} next to its tokens. Leave out the rows "
            "with pictures or sound, and the columns."
        )
    masks = [name for name in _MASKS if name in columns]
    if masks and LABELS not in columns:
        return (
            f"What is learnt of rows of tokens is said by {LABELS}, and {source} has {', '.join(masks)} instead. Write "
            f"a column {LABELS}: the token's id where it is learnt, else -100."
        )
    return None
