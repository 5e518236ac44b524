"""What settings that name a model and no recipe leave open."""

from __future__ import annotations

from collections.abc import Sequence

from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.model_files import architecture_fields, limit_of_positions

TOKENS = 2048
"""Of a row, where nobody says how long the data's are."""

_ROWS = {"training.per_device_train_batch_size", "training.gradient_accumulation_steps"}


def with_defaults_of_plan(settings: Sequence[str]) -> list[str]:
    """Settings that name a model and no recipe, with what a plan needs besides: a step of 16 rows of 2048 tokens.

    Args:
        settings: as typed.

    Returns:
        The defaults that they do not set themselves, then the settings. Rows are shorter where the model is known, on
        this machine or in the catalogue, to take no more.
    """
    values = {key: value for key, _, value in (setting.partition("=") for setting in settings)}
    defaults = [] if _ROWS & values.keys() else ["training.gradient_accumulation_steps=16"]
    if "data.max_length" not in values:
        defaults.append(f"data.max_length={_length(values.get('model') or values.get('model.name_or_path'))}")
    return [*defaults, *settings]


def _length(model: str | None) -> int:
    fields = architecture_fields(ModelConfig(name_or_path=model))
    limit = limit_of_positions({**fields, **(fields.get("text_config") or {})}.get)
    return TOKENS if limit is None else min(TOKENS, limit)
