"""A look at a recipe's data, by the tokenizer and whatever else of the model is there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lowmem_ft.data.inspection import Inspection, inspect_data
from lowmem_ft.data.text.no_tokenizer import NoTokenizer
from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.foundation.user_paths import expand_user
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.files.model_files import limit_of_positions
from lowmem_ft.models.tokenizer import end_token_ids, load_tokenizer, written_fields
from lowmem_ft.recipe import Recipe


def inspect_data_of(recipe: Recipe, *, show: int) -> Inspection:
    """Return what the model reads of a recipe's training data.

    The model needs no weights, and a folder with its tokenizer alone will do; the notes then say what is unknown. Rows
    that are tokens already need no tokenizer.

    Args:
        recipe: names the data and the model.
        show: see :func:`~lowmem_ft.data.inspection.inspect_data`.

    Raises:
        DataError: if training would refuse the data.
        ModelError: if there is no tokenizer, and rows are text.
    """
    model = recipe.model
    folder = expand_user(model.name_or_path or "")
    if folder.is_dir() and not (folder / "config.json").exists():
        model = replace(model, tokenizer_name_or_path=model.tokenizer_name_or_path or str(folder))
    tokenizer = tokenizer_or_none(model)
    fields, ends, note = {}, None, ()
    try:
        fields, ends = written_fields(recipe.model), end_token_ids(recipe.model)
    except ModelError as error:
        note = (f"Not checked, as the model cannot be read: its longest input, its vocabulary. {error}",)
    if ends is None:
        note = (*note, "Not checked: where generation stops. The model's files are not here to say it.")
    vocabulary = None if model.new_tokens else fields.get("vocab_size")  # new rows fit them
    found = inspect_data(
        recipe.data,
        tokenizer,
        max_positions=limit_of_positions(fields.get),
        vocab_size=vocabulary if isinstance(vocabulary, int) else None,
        end_token_ids=ends,
        seed=recipe.training.seed,
        rows_per_batch=recipe.training.per_device_train_batch_size,
        show=show,
    )
    if isinstance(tokenizer, NoTokenizer):
        note = (*note, f"Rows are shown as ids. {tokenizer.reason}")
    return replace(found, notes=(*found.notes, *note))


def tokenizer_or_none(model: ModelConfig) -> Any:
    """Return a model's tokenizer; if it cannot be read, what takes its place for rows that are tokens already."""
    try:
        return load_tokenizer(model)
    except ModelError as error:
        return NoTokenizer(error)
