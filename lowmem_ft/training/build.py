"""From a recipe to a session: the one ordered list of what is read, chosen, switched on and wrapped.

The order matters and is all here. What can fail fast comes first: precision and attention, then tokenizer and data, and
only then the weights. Techniques that change the model's forward come before the optimizer sees its parameters, and
Accelerate wraps last.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from pathlib import Path

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, get_scheduler

from lowmem_ft.errors import ModelError
from lowmem_ft.handle import Handle
from lowmem_ft.models import compute_dtype, load_model_config, weights_dtype
from lowmem_ft.optimizers import check_optimizer, create_optimizer
from lowmem_ft.recipe import Recipe, TrainingConfig
from lowmem_ft.techniques.attention import AttentionChoice, choose_attention
from lowmem_ft.techniques.checkpointing import enable_checkpointing
from lowmem_ft.techniques.chunked_loss import enable_chunked_loss
from lowmem_ft.techniques.precision import check_precision, enable_lost_update_meter
from lowmem_ft.training.runtime import Runtime
from lowmem_ft.training.session import Session

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is decided before any weight is read.

    Args:
        hf_config: the architecture.
        attention: the attention kernel and why.
    """

    hf_config: PretrainedConfig
    attention: AttentionChoice


def resumed(recipe: Recipe, checkpoint: Path) -> Recipe:
    """The recipe with architecture, weights and tokenizer from a checkpoint, wherever they once came from."""
    model = dataclasses.replace(
        recipe.model,
        name_or_path=str(checkpoint),
        tokenizer_name_or_path=None,
        weights="pretrained",
        revision=None,
        gguf_file=None,
    )
    return dataclasses.replace(recipe, model=model)


def plan_session(recipe: Recipe, runtime: Runtime, hf_config: PretrainedConfig | None = None) -> Plan:
    """Read the architecture, check what the device can do, choose the attention kernel.

    Args:
        recipe: what to plan for.
        runtime: where.
        hf_config: the architecture, if it is at hand.

    Returns:
        The plan.

    Raises:
        UserError: if the device cannot run the recipe.
        ModelError: if there is no such model.
    """
    hf_config = hf_config or load_model_config(recipe.model)
    dtype = weights_dtype(recipe.model, hf_config)
    check_precision(str(dtype).removeprefix("torch."), recipe.training.mixed_precision, runtime.device)
    check_optimizer(recipe.optimizer, runtime.device)
    attention = choose_attention(
        recipe.model.attn_implementation,
        config=hf_config,
        device=runtime.device,
        compute_dtype=compute_dtype(dtype, recipe.training.mixed_precision),
        packing=recipe.data.packing,
    )
    logger.info("Attention: %s (%s).", attention.implementation, attention.reason)
    return Plan(hf_config=hf_config, attention=attention)


def build_session(
    recipe: Recipe,
    runtime: Runtime,
    plan: Plan,
    *,
    num_training_steps: int,
) -> Session:
    """Load the weights, switch the recipe's techniques on, make the optimizer and its schedule, wrap them.

    Args:
        recipe: what to build.
        runtime: where.
        plan: what :func:`plan_session` decided.
        num_training_steps: optimizer steps in all, for the learning rate's schedule.

    Returns:
        A session ready to train; the optimizer's state is fresh (see ``checkpoint.load_checkpoint``).
    """
    model = runtime.load_model(
        recipe.model,
        plan.hf_config,
        attn_implementation=plan.attention.implementation,
        seed=recipe.training.seed,
    )
    model.train()
    handles: list[Handle] = []
    if recipe.checkpointing.mode != "none":
        handles.append(enable_checkpointing(model, recipe.checkpointing))
    if recipe.loss.chunk_tokens is not None:
        handles.append(enable_chunked_loss(model, recipe.loss))
    else:
        _refuse_mean_of_means(model)
    optimizer = create_optimizer(model, recipe.optimizer, learning_rate=recipe.training.learning_rate)
    scheduler = get_scheduler(
        recipe.training.lr_scheduler_type,
        optimizer,
        num_warmup_steps=num_warmup_steps(recipe.training, num_training_steps),
        num_training_steps=num_training_steps,
        scheduler_specific_kwargs=recipe.training.lr_scheduler_kwargs,
    )
    lost_updates = None
    if model.dtype.itemsize < 4:
        lost_updates = enable_lost_update_meter(optimizer)
        handles.append(lost_updates)
    prepared_model, prepared_optimizer = runtime.prepare(model, optimizer)
    _log_size(model)
    return Session(
        model=prepared_model,
        unwrapped_model=model,
        optimizer=prepared_optimizer,
        unwrapped_optimizer=optimizer,
        scheduler=scheduler,
        runtime=runtime,
        max_grad_norm=recipe.training.max_grad_norm,
        chunked_loss=recipe.loss.chunk_tokens is not None,
        lost_updates=lost_updates,
        handles=tuple(handles),
    )


def num_warmup_steps(config: TrainingConfig, num_training_steps: int) -> int:
    """Optimizer steps of warmup; ``warmup_steps`` below 1 is a share of all steps, rounded up as transformers does."""
    if config.warmup_steps >= 1:
        return int(config.warmup_steps)
    return -int(-config.warmup_steps * num_training_steps // 1)


def _refuse_mean_of_means(model: PreTrainedModel) -> None:
    """Without the window's token count a model averages over its own micro-batch, and accumulation goes wrong."""
    takes_any = any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD
        for parameter in inspect.signature(model.forward).parameters.values()
    )
    if not takes_any or getattr(model, "accepts_loss_kwargs", None) is False:
        raise ModelError(
            f"loss.chunk_tokens=null needs a model whose own loss takes num_items_in_batch, and that of "
            f"{type(model).__name__} does not: it would weigh tokens by the size of their micro-batch. "
            "Set loss.chunk_tokens=1024."
        )


def _log_size(model: nn.Module) -> None:
    total = sum(parameter.numel() for parameter in model.parameters())
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    logger.info(
        "%s: %s parameters, %s of them trainable.", type(model).__name__, f"{total:,}", f"{trainable:,}"
    )
