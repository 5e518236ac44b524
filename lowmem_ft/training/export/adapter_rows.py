"""Rows of new tokens that an adapter's files hold, and room for them in its base."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open
from transformers import PreTrainedModel

from lowmem_ft.models.new_tokens import resize_embeddings
from lowmem_ft.techniques.adapters.adapter_folder import CONFIG_FILE, WEIGHTS_FILE


def resize_for_adapter(model: PreTrainedModel, adapter: Path, name: str) -> None:
    """Give a base's embedding and head a row for each that was saved with an adapter, which then has its values.

    Args:
        model: the base.
        adapter: the adapter's folder, in PEFT's format.
        name: the base's, for messages.

    Raises:
        ModelError: as :func:`resize_embeddings`.
    """
    resize_embeddings(model, max(_rows_of_whole_table(model, adapter), _rows_trained_alone(adapter)), 0, name)


def _rows_of_whole_table(model: PreTrainedModel, adapter: Path) -> int:
    """Return the rows of the embedding that was saved with an adapter; 0: none was."""
    table = model.get_input_embeddings()
    (name,) = (name for name, module in model.named_modules() if module is table)
    saved = f"base_model.model.{name}.weight"
    with safe_open(adapter / WEIGHTS_FILE, framework="pt") as file:
        return file.get_slice(saved).get_shape()[0] if saved in file.keys() else 0  # noqa: SIM118


def _rows_trained_alone(adapter: Path) -> int:
    """Return the rows that a table needs for those that were trained alone; 0: none was."""
    named = json.loads((adapter / CONFIG_FILE).read_text("utf-8")).get("trainable_token_indices") or ()
    by_layer = named.values() if isinstance(named, dict) else [named]
    return max((index + 1 for indices in by_layer for index in indices), default=0)
