"""An optimizer for a model: its parameters in groups, and the row of the table that trains them."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn
from torch.optim import Optimizer
from transformers.trainer_pt_utils import get_parameter_names

from lowmem_ft.errors import UserError
from lowmem_ft.optimizers.bitsandbytes_optimizers import keep_embeddings_in_32bit
from lowmem_ft.optimizers.config import OptimizerConfig
from lowmem_ft.optimizers.table import OPTIMIZERS, check_optimizer

logger = logging.getLogger(__name__)

# Biases and norms by name, as transformers.Trainer.get_decay_parameter_names has them.
_NOT_DECAYED = ["bias", "layernorm", "rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


def create_optimizer(model: nn.Module, config: OptimizerConfig, *, learning_rate: float) -> Optimizer:
    """An optimizer over the trainable parameters of a model, grouped as ``transformers.Trainer`` groups them.

    It refuses what :func:`lowmem_ft.optimizers.check_optimizer` refuses, and a model with nothing to train.

    Args:
        model: on its final device; move it before, not after.
        config: which optimizer, and its hyperparameters.
        learning_rate: the peak learning rate; a schedule may lower it.

    Returns:
        A torch optimizer that holds no state yet: state comes with the first step.
    """
    groups = parameter_groups(model, config.weight_decay)
    check_optimizer(config, groups[0]["params"][0].device)
    row = OPTIMIZERS[config.name]
    optimizer = row.build(groups, lr=learning_rate, **config.hyperparameters())
    if row.needs_bitsandbytes:
        keep_embeddings_in_32bit(optimizer, model)
    for group in optimizer.param_groups:
        num_parameters = sum(parameter.numel() for parameter in group["params"])
        logger.info(
            "%s: %s parameters in %d tensors, weight decay %g (%s)",
            config.name,
            f"{num_parameters:,}",
            len(group["params"]),
            group["weight_decay"],
            row.summary,
        )
    return optimizer


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters with decay, then those without (biases, norms); a tied one once, no group empty.

    Args:
        model: frozen parameters of it are left out.
        weight_decay: decay of the first group.

    Returns:
        One or two groups, as ``torch.optim`` takes them.

    Raises:
        UserError: if no parameter is trainable.
    """
    decayed = set(get_parameter_names(model, [nn.LayerNorm], _NOT_DECAYED))
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trainable:
        raise UserError(
            f"Training needs a trainable parameter, got {type(model).__name__} with all of them frozen. "
            "Set requires_grad=True on what is to be trained."
        )
    with_decay = [parameter for name, parameter in trainable if name in decayed]
    without = [parameter for name, parameter in trainable if name not in decayed]
    groups = [{"params": with_decay, "weight_decay": weight_decay}, {"params": without, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
