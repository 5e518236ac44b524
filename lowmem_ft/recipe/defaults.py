"""What settings that name a model and no recipe leave open."""

from __future__ import annotations

from collections.abc import Sequence

_ROWS = {"training.per_device_train_batch_size", "training.gradient_accumulation_steps"}


def with_defaults_of_plan(settings: Sequence[str]) -> list[str]:
    """Settings that name a model and no recipe, with what a plan needs besides: a step of 16 rows of 2048 tokens.

    Args:
        settings: as typed.

    Returns:
        The defaults that they do not set themselves, then the settings.
    """
    keys = {setting.partition("=")[0] for setting in settings}
    defaults = [] if _ROWS & keys else ["training.gradient_accumulation_steps=16"]
    defaults += [] if "data.max_length" in keys else ["data.max_length=2048"]
    return [*defaults, *settings]
