"""FSDP 2 inside a trainer: Accelerate shards the model as training begins, and the recipe's optimizer follows it.

Techniques in forward are on from the start, as Accelerate must shard around them. The optimizer is made from the
shards, so that no process ever holds the state of a whole weight.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from lowmem_ft.foundation.handle import Handle
from lowmem_ft.techniques.distributed.fully_sharded import take_fsdp2
from lowmem_ft.techniques.modules.patching import call_around, set_attribute
from lowmem_ft.training.step.enabled_techniques import (
    Build,
    EnabledTechniques,
    enable_forward,
    enable_optimizer,
)

if TYPE_CHECKING:
    from lowmem_ft.hf.trainers.attaching import Attached


def enabled_before_sharding(build: Build) -> EnabledTechniques:
    """Enable techniques in forward; the optimizer has no weights until they are sharded.

    Args:
        build: a model that Accelerate has not sharded yet, and its recipe; an error leaves the model unchanged.
    """
    try:
        enable_forward(build)
    except BaseException:
        build.in_forward.remove()
        raise
    return EnabledTechniques(_without_weights(), build.in_forward)


def shard_as_training_begins(
    trainer: Any, build: Build, enabled: EnabledTechniques, attached: Attached
) -> Iterator[Callable[[], object]]:
    """Follow Accelerate when it shards the model; yield the calls that undo it, which leave the model sharded.

    Gradients are summed in float32, and those of each micro-batch as ``distributed.sync_each_batch`` says.

    Args:
        trainer: a trainer launched with FSDP 2.
        build: its model, with techniques in forward.
        enabled: the same, which gets the optimizer and what goes with it.
        attached: the handle, which gets what undoes these.
    """
    accelerator, model, optimizer = trainer.accelerator, trainer.model, trainer.optimizer

    def begin() -> None:
        build.shard = lambda parts: take_fsdp2(model)
        complete = enable_optimizer(build)
        attached.undo_first(
            build.after_forward.remove, complete.optimizer.state.clear, complete.techniques.flush
        )
        enabled.optimizer, enabled.techniques = complete.optimizer, complete.techniques
        attached.techniques = complete.techniques

    def prepare(stock: Callable[..., Any], *objects: Any, **options: Any) -> Any:
        if not any(one is model for one in objects):
            return stock(*objects, **options)
        # Accelerate puts each shard in the place of its weight, which it knows by an address: those without rows in
        # this process have the same. And it takes no model without an optimizer, as for an evaluation alone.
        optimizer.optimizer = _without_weights()
        is_given = any(one is optimizer for one in objects)
        with _types_kept(accelerator):
            prepared = stock(*objects, *(() if is_given else (optimizer,)))[: len(objects)]
        if enabled.techniques is build.in_forward:
            begin()
        optimizer.optimizer = enabled.optimizer
        return prepared if len(objects) > 1 else prepared[0]

    def resharded(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """End an evaluation, after which no backward frees the last weights."""
        output = stock(*args, **kwargs)
        with enabled.techniques.at_rest():
            return output

    yield call_around(accelerator, "prepare", prepare)
    yield call_around(trainer, "compute_loss", _counted_exactly)
    yield call_around(trainer, "evaluation_loop", resharded)
    plugin = accelerator.state.fsdp_plugin
    policy = plugin.mixed_precision_policy or MixedPrecisionPolicy()
    policy = dataclasses.replace(policy, reduce_dtype=torch.float32, output_dtype=None)
    yield set_attribute(plugin, "mixed_precision_policy", policy)
    if build.recipe.distributed.sync_each_batch:
        yield call_around(accelerator, "no_sync", lambda *_, **__: contextlib.nullcontext())


def _counted_exactly(
    stock: Callable[..., Any], *args: Any, num_items_in_batch: Any = None, **kwargs: Any
) -> Any:
    """Compute a loss with its number of tokens as an integer: FSDP casts floats that a model gets to 16 bits.

    With bf16 the count, and so the loss, would be off by up to 0.4% (transformers 5.23).
    """
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.long()
    return stock(*args, num_items_in_batch=num_items_in_batch, **kwargs)


def _types_kept(accelerator: Any) -> Handle:
    """Let trained 16-bit weights stay as they are, in a block: under mixed precision Accelerate makes them float32."""
    return Handle(set_attribute(accelerator.state, "_mixed_precision", "no"))


def _without_weights() -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": []}])
