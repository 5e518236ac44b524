"""The learning rate schedule, from transformers."""

from __future__ import annotations

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lowmem_ft.recipe import TrainingConfig


def create_scheduler(optimizer: Optimizer, config: TrainingConfig, num_training_steps: int) -> LRScheduler:
    """Create the learning rate schedule of a run.

    Args:
        optimizer: the optimizer whose learning rate it sets.
        config: names the schedule.
        num_training_steps: optimizer steps of the whole run.

    Returns:
        The schedule, at its first step.
    """
    # These import PEFT, which imports bitsandbytes and torch's compiler: a quarter of what an estimate would import,
    # which needs none of them.
    from transformers import get_scheduler

    return get_scheduler(
        config.lr_scheduler_type,
        optimizer,
        num_warmup_steps=_num_warmup_steps(config, num_training_steps),
        num_training_steps=num_training_steps,
        scheduler_specific_kwargs=config.lr_scheduler_kwargs,
    )


def _num_warmup_steps(config: TrainingConfig, num_training_steps: int) -> int:
    """Return the optimizer steps of warmup; ``warmup_steps`` below 1 is a share, rounded up as transformers does."""
    if config.warmup_steps >= 1:
        return int(config.warmup_steps)
    return -int(-config.warmup_steps * num_training_steps // 1)
