"""Fine-tune LLMs inside a memory budget, on stock HuggingFace models, with the exact mathematics of AdamW."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from lowmem_ft.foundation.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lowmem_ft.foundation.budget import Budget
    from lowmem_ft.foundation.errors import DoesNotFitError, Interrupted, UserError
    from lowmem_ft.planning.planner import MemoryPlan
    from lowmem_ft.planning.preflight.own_process import estimate_memory, plan, plan_checkpointing, rehearse
    from lowmem_ft.planning.preflight.train import train
    from lowmem_ft.planning.rehearsal import Rehearsal
    from lowmem_ft.planning.script_runs import estimate_script
    from lowmem_ft.recipe import Recipe, load_recipe
    from lowmem_ft.training.callbacks.events import EvaluationEvent, SaveEvent, StepEvent, Stop
    from lowmem_ft.virtual_gpu import VirtualGPU

# transformers imports bitsandbytes, which advertises a kernel for 4-bit inference on CPUs at every import. In every
# 8-bit product of every step it also says that the input is rounded to float16 first. No user can act on either.
for _chatty in ("bitsandbytes.backends.cpu.ops", "bitsandbytes.autograd._functions"):
    logging.getLogger(_chatty).setLevel(logging.ERROR)

__version__ = "0.1.0"

__all__ = [
    "Budget",
    "DoesNotFitError",
    "EvaluationEvent",
    "Interrupted",
    "MemoryPlan",
    "Recipe",
    "Rehearsal",
    "SaveEvent",
    "StepEvent",
    "Stop",
    "UserError",
    "VirtualGPU",
    "estimate_memory",
    "estimate_script",
    "load_recipe",
    "plan",
    "plan_checkpointing",
    "rehearse",
    "train",
]

__getattr__ = lazy_exports(__name__)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
