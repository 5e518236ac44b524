"""An optimizer for a model: its parameters in groups, and the row of the table that trains them."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers.trainer_pt_utils import get_parameter_names

from lowmem_ft.foundation.devices import kernels_of
from lowmem_ft.foundation.errors import UserError, raise_problems, raise_together
from lowmem_ft.optimizers.chunked.chunked_optimizer import ChunkedOptimizer
from lowmem_ft.optimizers.config import OptimizerConfig
from lowmem_ft.optimizers.table import optimizers_that
from lowmem_ft.optimizers.updates.bitsandbytes_optimizers import build_bitsandbytes, keep_embeddings_in_32bit

logger = logging.getLogger(__name__)

# Names of biases and norms, as in transformers.Trainer.get_decay_parameter_names.
_NOT_DECAYED = ["bias", "layernorm", "rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


def create_optimizer(
    model: nn.Module, config: OptimizerConfig, *, learning_rate: float, seed: int = 0
) -> Optimizer:
    """Create an optimizer over the trainable parameters of a model, grouped as ``transformers.Trainer`` groups them.

    It rejects what :func:`check_optimizer` rejects, and a model with nothing to train.

    Args:
        model: on its final device; move it before, not after.
        config: the optimizer and its hyperparameters.
        learning_rate: the peak learning rate; a schedule may lower it.
        seed: seed of the random rounding of weights and state, in the formats that use it.

    Returns:
        A torch optimizer that holds no state yet: ``allocate_state()`` or the first step allocates it.
    """
    groups = parameter_groups(model, config.weight_decay)
    check_optimizer(config, groups[0]["params"][0].device)
    _check_master(config, groups)
    optimizer = _built(groups, config, learning_rate=learning_rate, seed=seed)
    if config.row.bitsandbytes is not None:
        keep_embeddings_in_32bit(optimizer, model)
    if may_lose_updates(optimizer):
        logger.warning(
            "No master weights for 16-bit weights with optimizer.name=%s: updates smaller than their rounding are "
            "lost, and the run counts them. To keep them, use %s with optimizer.master=split24 (1 byte a parameter) "
            "or split16 (2).",
            config.name,
            ", ".join(optimizers_that("takes_formats")),
        )
    _log_choice(config, groups)
    return optimizer


def create_torch_adamw(
    model: nn.Module, config: OptimizerConfig, *, learning_rate: float
) -> torch.optim.AdamW:
    """Create torch's AdamW over the same groups, for an engine that stores masters and state itself.

    Args:
        model: see :func:`create_optimizer`.
        config: its ``name`` is adamw; the formats are ignored.
        learning_rate: the peak.

    Raises:
        UserError: if the model has nothing to train.
    """
    groups = parameter_groups(model, config.weight_decay)
    _log_choice(config, groups)
    return torch.optim.AdamW(groups, lr=learning_rate, **config.hyperparameters())


def check_optimizer(config: OptimizerConfig, device: torch.device) -> None:
    """Reject an optimizer that cannot run here, before a model is loaded for it.

    Args:
        config: the optimizer and its hyperparameters.
        device: the device of the trained weights.

    Raises:
        UserError: naming every hyperparameter that is out of range or that the optimizer does not have, a device
            it does not run on, and bitsandbytes if it is needed and not installed.
    """
    raise_together(
        lambda: raise_problems(config.problems()),
        lambda: raise_problems(config.problems_on(device.type, kernels_of(device))),
        config.require_packages,
    )


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Group the trainable parameters: with decay, then without (biases, norms); a tied one once, no group empty.

    Args:
        model: its frozen parameters are left out.
        weight_decay: decay of the first group.

    Returns:
        One or two groups, in the form that ``torch.optim`` takes.

    Raises:
        UserError: if no parameter is trainable.
    """
    decayed = set(get_parameter_names(model, [nn.LayerNorm], _NOT_DECAYED))
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trainable:
        raise UserError(
            f"Training needs a trainable parameter, got {type(model).__name__} with all of them frozen. Set "
            "requires_grad=True on the parameters to train."
        )
    with_decay = [parameter for name, parameter in trainable if name in decayed]
    without = [parameter for name, parameter in trainable if name not in decayed]
    groups = [{"params": with_decay, "weight_decay": weight_decay}, {"params": without, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _log_choice(config: OptimizerConfig, groups: list[dict[str, Any]]) -> None:
    tensors = [parameter for group in groups for parameter in group["params"]]
    decayed = [group for group in groups if group["weight_decay"]]
    decay = ", ".join(f"{group['weight_decay']:g} for {len(group['params'])} of them" for group in decayed)
    logger.info(
        "Optimizer: %s (%s) for %s parameters in %d tensors; weight decay %s.",
        config.name,
        config.row.summary,
        f"{sum(parameter.numel() for parameter in tensors):,}",
        len(tensors),
        decay or "0",
    )


def may_lose_updates(optimizer: Optimizer) -> bool:
    """Return whether an optimizer rounds 16-bit weights to nearest, without a master: then small updates are lost."""
    dtypes = {parameter.dtype for group in optimizer.param_groups for parameter in group["params"]}
    is_16_bit = any(dtype.itemsize < 4 for dtype in dtypes)
    return is_16_bit and (not isinstance(optimizer, ChunkedOptimizer) or optimizer.master_format == "none")


def _built(
    groups: list[dict[str, Any]], config: OptimizerConfig, *, learning_rate: float, seed: int
) -> Optimizer:
    """Build the optimizer over parameter groups, each with its ``weight_decay``."""
    defaults = {"lr": learning_rate, **config.hyperparameters()}
    form = config.row.bitsandbytes
    if form is not None:
        return build_bitsandbytes(groups, form, **defaults)
    rule = config.row.update_rule()
    return ChunkedOptimizer(groups, rule, defaults, state=config.state, master=config.master, seed=seed)


def _check_master(config: OptimizerConfig, groups: list[dict[str, Any]]) -> None:
    """Reject weights that ``optimizer.master`` does not apply to."""
    dtypes = {parameter.dtype for group in groups for parameter in group["params"]}
    if config.row.bitsandbytes is not None:
        return
    seen = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
    if config.master != "fp32" and torch.bfloat16 not in dtypes:
        raise UserError(
            f"optimizer.master={config.master} is for bfloat16 weights, but the trained ones are {seen}. Set "
            "optimizer.master=fp32 (float32 weights are their own master) or model.dtype=bfloat16."
        )
    if not dtypes <= {torch.bfloat16, torch.float32}:
        raise UserError(
            f"Trained weights are float32 or bfloat16, got {seen}. Set model.dtype to one of the two."
        )
