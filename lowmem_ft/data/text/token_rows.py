"""Rows that are tokens already: ``input_ids``, with or without ``labels`` and ``attention_mask``, as models take them.

A row is taken as it is: no template is applied, and no token is added at its end. Its labels say what is learnt; where
it has no labels, each token is. The attention mask says what is padding, which is taken off both ends. Ids of another
tokenizer are not recognised, unless they are beyond the model's vocabulary.

Numpy is imported where rows are read: recipes are checked without it.

Axes: T tokens of one row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowmem_ft.data.row import IGNORED_LABEL
from lowmem_ft.data.text.examples import Row, Tokens
from lowmem_ft.data.text.token_columns import IDS, LABELS, MASK, POSITIONS
from lowmem_ft.data.text.tool_calls import shortened
from lowmem_ft.foundation.errors import DataError

if TYPE_CHECKING:
    import numpy as np

LARGEST_ID = 2**31 - 1
"""Ids are stored in 32 bits."""


def read_tokens(row: Row) -> Tokens:
    """Return the tokens of a row without padding, and which of them are learnt.

    Args:
        row: values by column; a column that the data does not have is not among them.

    Raises:
        DataError: if a column is no list of whole numbers, lists have different lengths, the row has no token, or a
            label is neither its token's id nor -100, or all are -100.
    """
    import numpy as np

    ids_T = _whole_numbers(row, IDS)
    if (outside := (ids_T < 0) | (ids_T > LARGEST_ID)).any():
        place = int(np.argmax(outside))
        raise DataError(
            f"{IDS}[{place}] is {ids_T[place]}, and an id is from 0 to {LARGEST_ID:,}. Write the ids of a tokenizer."
        )
    kept = _kept(row, len(ids_T)) if len(ids_T) else slice(0, 0)
    if kept.start == kept.stop:
        seen = f"{len(ids_T)} and an {MASK} of zeros" if len(ids_T) else "[]"
        raise DataError(
            f"A row has at least one token in {IDS} that is not padding, got {seen}. Leave the row out, as by "
            "dataset.filter."
        )
    _refuse_several_documents(row, kept, len(ids_T))
    ids_T, is_learnt_T = ids_T[kept], np.ones(kept.stop - kept.start, dtype=bool)
    if LABELS in row:
        is_learnt_T = _learnt(ids_T, _of_each_token(row, LABELS, kept, len(row[IDS])), kept.start)
    return Tokens(ids_T.astype(np.int32), is_learnt_T)


def _whole_numbers(row: Row, column: str) -> np.ndarray:
    """Return a row's values in a column as int64."""
    import numpy as np

    values: Any = row.get(column)
    if values is None:
        raise DataError(
            f"{column} is null here, and the data has that column. Write it for each row, or leave the row out."
        )
    try:
        array = np.asarray(values)
    except ValueError:  # lists of different lengths
        array = np.empty((1, 1))
    if array.ndim != 1:
        way_out = {
            list: "A tokenizer with return_tensors makes a batch of one row: take its first.",
            str: "Write the rows as JSON lines or Parquet.",
        }.get(type(values), "Write one for each row, or leave the column out.")
        raise DataError(f"{column} is a list of whole numbers, got {shortened(values)}. {way_out}")
    if array.size and array.dtype.kind not in ("biu" if column == MASK else "iu"):
        kinds = (int, np.integer)
        place = next(
            (i for i, one in enumerate(values) if type(one) is bool or not isinstance(one, kinds)), 0
        )
        raise DataError(
            f"{column} is a list of whole numbers, got {values[place]!r} at place {place}. Save it as integers, as by "
            f"dataset.cast_column({column!r}, datasets.List(datasets.Value('int64')))."
        )
    return array.astype(np.int64)


def _of_each_token(row: Row, column: str, kept: slice, length: int) -> np.ndarray:
    """Return a column's values at the tokens that are kept; it has one for each token of the row."""
    values = _whole_numbers(row, column)
    if len(values) != length:
        raise DataError(
            f"{column} has a value for each token, got {len(values)} for {length} {IDS}. Write as many, or leave the "
            "row out."
        )
    return values[kept]


def _kept(row: Row, length: int) -> slice:
    """Return the tokens that are not padding, which is at either end."""
    import numpy as np

    if MASK not in row:
        return slice(0, length)
    mask_T = _of_each_token(row, MASK, slice(None), length)
    if (other := (mask_T != 0) & (mask_T != 1)).any():
        place = int(np.argmax(other))
        raise DataError(
            f"{MASK} is 1 at a token and 0 at padding, got {mask_T[place]} at place {place}. A row is one document: "
            "write those of a packed row apart; data.packing=true packs them."
        )
    places = np.flatnonzero(mask_T)
    start, stop = (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 0)
    if stop - start > len(places):
        hole = start + int(np.argmin(mask_T[start:stop]))
        raise DataError(
            f"{MASK} is 0 at the ends of a row alone, where its padding is, got 0 at place {hole} between tokens. "
            f"Leave such tokens out of {IDS}; to read and not learn them, set their {LABELS} to {IGNORED_LABEL}."
        )
    return slice(start, stop)


def _refuse_several_documents(row: Row, kept: slice, length: int) -> None:
    import numpy as np

    if POSITIONS not in row:
        return
    positions_T = _of_each_token(row, POSITIONS, kept, length)
    if (jumps := np.diff(positions_T) != 1).any() or positions_T[0] not in (0, kept.start):
        place = kept.start + (int(np.argmax(jumps)) + 1 if jumps.any() else 0)
        raise DataError(
            f"{POSITIONS} count the tokens of a row from 0, got {positions_T[place - kept.start]} at place {place}. A "
            "row is one document: write those of a packed row apart; data.packing=true packs them."
        )


def _learnt(ids_T: np.ndarray, labels_T: np.ndarray, start: int) -> np.ndarray:
    """Return which tokens are learnt, by their labels; ``start`` is the place of the first one in its row."""
    import numpy as np

    is_learnt_T = labels_T != IGNORED_LABEL
    if not is_learnt_T.any():
        raise DataError(
            f"{LABELS} are {IGNORED_LABEL} at all {len(ids_T)} tokens, so that nothing is learnt. Leave the row out, "
            "as by dataset.filter."
        )
    if (other := is_learnt_T & (labels_T != ids_T)).any():
        at = int(np.argmax(other))
        is_shifted = np.array_equal(labels_T[:-1][is_learnt_T[:-1]], ids_T[1:][is_learnt_T[:-1]])
        raise DataError(
            f"A label is the id of its own token or {IGNORED_LABEL}, got {LABELS}[{start + at}]={labels_T[at]} at "
            f"{IDS}[{start + at}]={ids_T[at]}. "
            + (
                f"They are shifted by one, which the model does itself: write them at the places of {IDS}."
                if is_shifted and len(ids_T) > 1
                else "Correct it."
            )
        )
    return is_learnt_T
