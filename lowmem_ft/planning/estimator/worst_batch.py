"""The largest micro-batch that a recipe can meet: its memory is the run's.

Axes: T tokens of a row.
"""

from __future__ import annotations

import numpy as np
from transformers import PretrainedConfig

from lowmem_ft.data.batches.batch import Batch
from lowmem_ft.data.batches.collating import Collator
from lowmem_ft.data.row import IGNORED_LABEL, TokenizedExample
from lowmem_ft.foundation.errors import DataError, raise_problems
from lowmem_ft.models.hf_config import max_positions
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.rules.run_rules import oversized_steps

DOCUMENTS_PER_PACKED_ROW = 4
"""Documents in a packed row of which a recipe does not say how many it has; its memory does not depend on the number,
as long as there are several, and its seconds do: attention costs by the lengths of documents."""


def worst_batch(
    recipe: Recipe, hf_config: PretrainedConfig, num_rows: int, *, attn_implementation: str
) -> Batch:
    """Return a micro-batch of full rows in which every token is learnt, collated as in training.

    Args:
        recipe: for the length of rows, and whether they are packed.
        hf_config: for the model's longest sequence, which counts where ``data.max_length`` is null.
        num_rows: rows of the micro-batch.
        attn_implementation: decides the layout of packed rows.

    Returns:
        The batch, on the host.

    Raises:
        DataError: if the model takes no rows that long, or neither recipe nor model limits their length.
    """
    collate = full_row_collator(recipe, hf_config, attn_implementation=attn_implementation)
    row = [_example(length) for length in documents_of_full_row(recipe, hf_config)]
    return collate([row] * num_rows)


def documents_of_full_row(recipe: Recipe, hf_config: PretrainedConfig) -> tuple[int, ...]:
    """Return the tokens of each document of a row that :func:`worst_batch` has.

    Raises:
        DataError: see :func:`worst_batch`.
    """
    length = row_length(recipe, hf_config)
    number = recipe.data.documents_per_row or DOCUMENTS_PER_PACKED_ROW if recipe.data.packing else 1
    num_documents = min(number, length)
    return tuple(len(part) for part in np.array_split(np.arange(length), num_documents))


def full_row_collator(recipe: Recipe, hf_config: PretrainedConfig, *, attn_implementation: str) -> Collator:
    """Return what collates a recipe's longest rows; see :func:`worst_batch`."""
    return Collator(
        pad_token_id=0,
        max_length=row_length(recipe, hf_config),
        packed=recipe.data.packing,
        in_one_row="flash" in attn_implementation,
    )


def refuse_too_many_tokens(recipe: Recipe, hf_config: PretrainedConfig) -> None:
    """Refuse a batch that would take minutes to trace, and is a typing error: no GPU holds it.

    Raises:
        DataError: if a micro-batch or a step is too large, or rows have no length.
    """
    raise_problems(oversized_steps(recipe, row_length(recipe, hf_config)), DataError)


def row_length(recipe: Recipe, hf_config: PretrainedConfig) -> int:
    """Return the tokens of the longest row: ``data.max_length``, or else the model's limit.

    Raises:
        DataError: if it is beyond the model's limit, or neither of the two is set.
    """
    limit, length = max_positions(hf_config), recipe.data.max_length
    if length is None and limit is None:
        raise DataError(
            "An estimate needs a row length, but data.max_length is null and the model has no limit. Set "
            "data.max_length."
        )
    recipe.data.refuse_positions(limit)
    return limit if length is None else length  # type: ignore[return-value]


def _example(length: int) -> TokenizedExample:
    labels_T = np.ones(length, dtype=np.int64)
    labels_T[0] = IGNORED_LABEL
    return TokenizedExample(sample_id=0, input_ids_T=np.ones(length, dtype=np.int64), labels_T=labels_T)
