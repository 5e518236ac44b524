"""Recipes in users' own training scripts: ``transformers.Trainer`` and TRL's trainers, unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowmem_ft.foundation.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lowmem_ft.hf.arguments import (
        distillation_config,
        dpo_config,
        grpo_config,
        kto_config,
        reward_config,
        rloo_config,
        sft_config,
        training_arguments,
    )
    from lowmem_ft.hf.memory_callback import MemoryCallback
    from lowmem_ft.hf.trainers.attaching import Attached, attach
    from lowmem_ft.hf.trainers.prepared_model import prepare_model
    from lowmem_ft.planning.script_recipes.script_recipe import recipe_from
    from lowmem_ft.planning.script_recipes.trl_rows import load_rows

__all__ = [
    "Attached",
    "MemoryCallback",
    "attach",
    "distillation_config",
    "dpo_config",
    "grpo_config",
    "kto_config",
    "load_rows",
    "prepare_model",
    "recipe_from",
    "reward_config",
    "rloo_config",
    "sft_config",
    "training_arguments",
]

__getattr__ = lazy_exports(__name__)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
