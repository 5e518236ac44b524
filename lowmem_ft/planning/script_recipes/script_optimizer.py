"""The optimizer of a user's script in a recipe's terms."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Trainer

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.optimizers import ChunkedOptimizer, OptimizerConfig
from lowmem_ft.optimizers.table import OPTIMIZERS, OptimizerName
from lowmem_ft.planning.script_recipes.untranslated import Reading, script_estimate
from lowmem_ft.recipe.trainers.shared_settings import BY_HF_NAME, plain, read_group


def optimizer_config(
    args: Any,
    model: nn.Module,
    own: torch.optim.Optimizer | None,
    *,
    keeps_no_masters: bool,
    reading: Reading,
) -> OptimizerConfig:
    """Return the optimizer group of the recipe.

    Args:
        args: ``TrainingArguments`` of the script.
        model: the model that is trained.
        own: an optimizer that the script passes; None: the arguments name it.
        keeps_no_masters: whether all weights are trained in bfloat16, for which an optimizer of torch keeps no masters.
        reading: collects what has no counterpart.
    """
    said = read_group(args, "optimizer")
    found, asked = said["name"], f"optim={plain(args.optim)}"
    if own is not None and not _is_that_of_the_arguments(own, args, model):
        asked = f"{type(own).__module__}.{type(own).__qualname__}"
        found = _name_of(own)
    if found is None:
        reading.problem(
            f"The optimizer {asked} has no counterpart in a recipe, which has {', '.join(BY_HF_NAME)}. "
            f"{script_estimate()}"
        )
        return OptimizerConfig()
    row = OPTIMIZERS[found]
    hyperparameters = {
        name: said[name] for name, default in row.hyperparameters.items() if said[name] != default
    }
    formats: dict[str, Any] = {}
    if keeps_no_masters and row.takes_formats:
        formats["master"] = "none"
        if row.takes_state_formats and hyperparameters.get("momentum") != 0:
            formats["state"] = "bf16"
    if found == "adamw" and asked == "optim=adamw_torch" and not args.use_cpu:
        reading.warn(
            "optim=adamw_torch updates all weights at once on a GPU and meanwhile holds additional memory as large as "
            "its second averages, which the estimate does not count; optim=adamw_torch_fused does not."
        )
    return OptimizerConfig(name=found, weight_decay=said["weight_decay"], **hyperparameters, **formats)


def _is_that_of_the_arguments(own: torch.optim.Optimizer, args: Any, model: nn.Module) -> bool:
    """Check whether a trainer made it from the arguments as training began; bitsandbytes' differ in more than class."""
    theirs, _ = Trainer.get_optimizer_cls_and_kwargs(args, model)  # type: ignore[arg-type]
    return type(own) is theirs


def _name_of(optimizer: torch.optim.Optimizer) -> OptimizerName | None:
    """Return our name of an optimizer that the script passes."""
    if isinstance(optimizer, ChunkedOptimizer):
        raise UserError(
            "A script's recipe is read before hf.attach. Call hf.recipe_from first; pass MemoryCallback the same "
            "recipe as hf.attach."
        )
    by_class: dict[str, OptimizerName] = {
        "torch.optim.adamw.AdamW": "adamw",
        "torch.optim.sgd.SGD": "sgd",
        "transformers.optimization.Adafactor": "adafactor",
    }
    return by_class.get(f"{type(optimizer).__module__}.{type(optimizer).__qualname__}")
