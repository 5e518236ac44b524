"""The techniques of a recipe: the one ordered list of what is enabled around a model and its optimizer.

The order matters and is defined only here, in five phases: :data:`ADAPTERS`, :data:`FORWARD`, :data:`SHARDING`,
:data:`STATE` and :data:`STEP`. What changes the model's forward comes before the optimizer sees its parameters, from
the inside out: MLP tiles are inside a checkpointed layer, which is inside the loop over micro-batches, which is inside
the visit of streamed weights.

A technique joins a run by its entry in one of them, and nowhere else; other training loops enable techniques
through the same list. Most entries need nothing of each other. Where they do, one finds the other in the
:class:`Build`:

- MLP tiles compute all of an MLP again, so that recomputed activations have nothing left to do;
- streamed weights give the chunked loss its head in tiles, and fused accumulation sums its head's gradient within it;
- sharding loads the weights: the chunked loss is compared with the stock one only then, and leaves weights gathered,
  which are sharded again; it needs the head in forward alone;
- sharded gradients are summed even in a step of one micro-batch, in float32 by FSDP2 itself;
- streamed weights are updated by the optimizer in backward, while they visit the device;
- updates overlap with the next forward where backward leaves them waiting, and nothing else moves or shards weights.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch.optim import Optimizer
from transformers import PreTrainedModel

from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.foundation.handle import Handle
from lowmem_ft.foundation.host.pinned_memory import HostMemory
from lowmem_ft.models.files.hub_names import hub_id_of
from lowmem_ft.models.hf_config import compute_dtype
from lowmem_ft.models.master_weights import MasterWeights
from lowmem_ft.models.new_tokens import new_rows, refuse_untrained_rows
from lowmem_ft.models.other_parts import other_parts
from lowmem_ft.optimizers import ChunkedOptimizer, create_optimizer, create_torch_adamw, may_lose_updates
from lowmem_ft.recipe import Recipe
from lowmem_ft.techniques.accumulation.float32_accumulation import enable_float32_accumulation
from lowmem_ft.techniques.accumulation.fused_accumulation import enable_fused_accumulation
from lowmem_ft.techniques.accumulation.vertical_accumulation import enable_vertical_accumulation
from lowmem_ft.techniques.adapters.fused_adapter import enable_fused_adapters
from lowmem_ft.techniques.adapters.lora import enable_lora
from lowmem_ft.techniques.checkpointing.checkpointed_layers import enable_checkpointing
from lowmem_ft.techniques.checkpointing.recomputed_activation import enable_recomputed_activations
from lowmem_ft.techniques.distributed.fully_sharded import FullySharded
from lowmem_ft.techniques.kernels.fused_operators import enable_fused_operators
from lowmem_ft.techniques.loss.chunked_loss import ChunkedLoss, enable_chunked_loss
from lowmem_ft.techniques.modules.model_parts import ModelParts
from lowmem_ft.techniques.offload.activation_offload import enable_activation_offload
from lowmem_ft.techniques.offload.optimizer_offload import enable_optimizer_offload
from lowmem_ft.techniques.optimizer_in_backward import InBackward, enable_optimizer_in_backward
from lowmem_ft.techniques.precision import enable_lost_update_meter
from lowmem_ft.techniques.streaming.parameter_streaming import ParameterStreaming, enable_parameter_streaming
from lowmem_ft.techniques.technique import Technique, Techniques
from lowmem_ft.techniques.tiling.tiled_mlp import enable_tiled_mlp
from lowmem_ft.techniques.update_overlap import enable_update_overlap
from lowmem_ft.training.step.initial_masters import initialize_masters

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=Technique)


@dataclasses.dataclass(kw_only=True)
class Build:
    """A model, what its techniques need, and those that are enabled so far.

    Args:
        model: a causal LM, or a PEFT model around one.
        recipe: names the techniques and the optimizer.
        host_memory: holds offloaded tensors.
        has_adapters: whether the model has the recipe's adapters already.
        rows_per_micro_batch: in vertical order, the rows that pass through a layer together.
        sums: whether a step sums several gradients.
        full_precision_weights: reads the checkpoint's weights in full if the model's bfloat16 weights have lost bits.
        computes_loss: whether the loop computes the loss itself, in place of the model.
        shard: shards the model's parameters over several processes, if they share them.
        reads_weights_flushed: whether the loop calls ``techniques.flush()`` before anyone reads weights between two
            steps, so that updates of weights on the device may also be deferred to the next forward. In other loops,
            a user's callbacks would read the weights of the previous step.
        optimizer: over the trainable parameters; None before :data:`STATE`.
        in_forward: the enabled techniques of :data:`ADAPTERS`, :data:`FORWARD` and :data:`SHARDING`.
        after_forward: those of :data:`STATE` and :data:`STEP`.
    """

    model: PreTrainedModel
    recipe: Recipe
    host_memory: HostMemory
    has_adapters: bool = False
    rows_per_micro_batch: int = 1
    sums: bool = False
    full_precision_weights: Callable[[], MasterWeights | None] = lambda: None
    computes_loss: bool = False
    shard: Callable[[ModelParts], FullySharded | None] = lambda parts: None
    reads_weights_flushed: bool = False
    optimizer: Any = None
    in_forward: Techniques = dataclasses.field(default_factory=Techniques)
    after_forward: Techniques = dataclasses.field(default_factory=Techniques)

    @functools.cached_property
    def parts(self) -> ModelParts:
        """The parts of the model, for techniques of all phases after :data:`ADAPTERS`."""
        return ModelParts(self.model)

    def find(self, kind: type[T]) -> T | None:
        """Return the technique of a kind; None if it is not enabled."""
        return self.in_forward.find(kind) or self.after_forward.find(kind)

    @property
    def sums_gradients(self) -> bool:
        """True if gradients are summed: over several micro-batches, or by FSDP2, which sums even a single one."""
        return self.sums or self.find(FullySharded) is not None

    def enable(self, specs: Iterable[Spec], techniques: Techniques) -> None:
        """Enable those of a phase that are on, in their order, and add each to ``techniques`` before the next."""
        for spec in specs:
            if spec.on(self) and (technique := spec.enable(self)) is not None:
                techniques.add(technique)


@dataclasses.dataclass(frozen=True)
class Spec:
    """The entry of a technique.

    Args:
        on: tells whether the technique is enabled, from the recipe and what is enabled already.
        enable: enables it, and returns it; None if the entry adds none, such as one that only checks.
    """

    on: Callable[[Build], bool]
    enable: Callable[[Build], Technique | None]


@dataclasses.dataclass
class EnabledTechniques:
    """The optimizer and the enabled techniques with which a recipe trains a model.

    Args:
        optimizer: lowmem_ft's or bitsandbytes', or torch's AdamW for an engine, over the trainable parameters.
        techniques: the enabled techniques, for a training loop to call.
    """

    optimizer: Optimizer
    techniques: Techniques


def enable_techniques(build: Build) -> EnabledTechniques:
    """Enable a recipe's techniques, in their order, and make the optimizer between them.

    Args:
        build: a model, its recipe, and what surrounds them.

    Returns:
        The optimizer and the techniques; an error leaves the model unchanged.
    """
    try:
        enable_forward(build)
        return enable_optimizer(build)
    except BaseException:
        Handle(build.in_forward.remove, build.after_forward.remove).remove()
        raise


def enable_forward(build: Build) -> None:
    """Enable what changes the model's forward, before its weights are sharded."""
    build.enable((*ADAPTERS, *FORWARD), build.in_forward)


def enable_optimizer(build: Build) -> EnabledTechniques:
    """Shard the weights, make the optimizer, and enable what goes with it; :func:`enable_forward` comes before."""
    recipe, training = build.recipe, build.recipe.training
    build.enable(SHARDING, build.in_forward)
    if recipe.distributed.plan().has_engine:  # which updates, sums and offloads by itself
        optimizer = create_torch_adamw(build.model, recipe.optimizer, learning_rate=training.learning_rate)
        return EnabledTechniques(optimizer, build.in_forward)
    build.optimizer = optimizer = create_optimizer(
        build.model, recipe.optimizer, learning_rate=training.learning_rate, seed=training.seed
    )
    with build.in_forward.at_rest():  # the state begins with the weights' values
        build.enable(STATE, build.after_forward)
        if isinstance(optimizer, ChunkedOptimizer):  # bitsandbytes' allocate theirs in the first step
            optimizer.allocate_state()
            initialize_masters(optimizer, build.model, build.full_precision_weights)
    build.enable(STEP, build.after_forward)
    # Streamed weights are outermost: they apply deferred updates, and come to rest before the state returns.
    return EnabledTechniques(optimizer, Techniques(*build.after_forward, *build.in_forward))


def _lora(build: Build) -> Technique:
    config = build.recipe.model
    return enable_lora(
        build.model,
        build.recipe.adapter,
        base_name=hub_id_of(config.name_or_path or ""),
        base_revision=config.revision,
        whole=other_parts(build.model),
        new_rows=new_rows(build.model),
    )


def _refuse_untrained_rows(build: Build) -> None:
    trained_alone = build.recipe.adapter.train_new_tokens
    refuse_untrained_rows(build.model, build.recipe.model, trained_alone=trained_alone)


def _fused_operators(build: Build) -> Technique:
    kernels, device = build.recipe.model.kernels, build.host_memory.device
    compute = compute_dtype(build.model.dtype, build.recipe.training.mixed_precision)
    return enable_fused_operators(build.parts, kernels, device=device, compute_dtype=compute)


def _recomputed_activations(build: Build) -> Technique | None:
    if build.recipe.tiling.mlp > 1:
        logger.info(
            "MLP tiling already recomputes the whole MLP, so checkpointing.mlp_activation has no effect."
        )
        return None
    return enable_recomputed_activations(
        build.parts, build.recipe.checkpointing, device=build.host_memory.device
    )


def _vertical_accumulation(build: Build) -> Technique:
    keeps_inputs_alone = build.recipe.checkpointing.mode == "full"
    return enable_vertical_accumulation(
        build.parts, build.rows_per_micro_batch, keeps_inputs_alone=keeps_inputs_alone
    )


def _chunked_loss(build: Build) -> Technique:
    recipe, device = build.recipe, build.host_memory.device
    is_loaded = not recipe.distributed.plan().shards_rows
    return enable_chunked_loss(build.parts, recipe.loss, recipe.tiling, device=device, compare=is_loaded)


def _parameter_streaming(build: Build) -> Technique:
    return enable_parameter_streaming(
        build.parts,
        build.recipe.offload,
        device=build.host_memory.device,
        host=build.host_memory,
        trained=build.recipe.adapter.name == "none",
        loss=build.find(ChunkedLoss),
    )


def _compare_sharded_loss(build: Build) -> None:
    sharded, loss = build.find(FullySharded), build.find(ChunkedLoss)
    assert sharded is not None
    assert loss is not None
    sharded.model.unshard()  # what belongs to no layer: PEFT's wrapper, around the model that is compared, would do it
    loss.compare_with_stock()
    sharded.reshard()
    sharded.spare_head_in_backward()


def _float32_accumulation(build: Build) -> Technique:
    if sharded := build.find(FullySharded):
        sharded.sum_in_float32(several_in_backward=build.recipe.accumulation.order == "vertical")
    takes_float32 = isinstance(build.optimizer, ChunkedOptimizer)
    return enable_float32_accumulation(build.optimizer, takes_float32=takes_float32)


def _fused_accumulation(build: Build) -> Technique | None:
    if not build.sums_gradients:
        logger.info("accumulation.fusion has no effect: a step has one micro-batch.")
        return None
    return enable_fused_accumulation(
        build.parts, device=build.host_memory.device, loss=build.find(ChunkedLoss)
    )


def _optimizer_in_backward(build: Build) -> Technique:
    assert isinstance(build.optimizer, ChunkedOptimizer), "the recipe's rules reject others"
    updates = enable_optimizer_in_backward(
        build.optimizer,
        device=build.host_memory.device,
        max_grad_norm=build.recipe.training.max_grad_norm,
        memory=build.host_memory if build.recipe.offload.optimizer == "host" else None,
    )
    if streaming := build.find(ParameterStreaming):
        streaming.update_with(updates)
    return updates


def _update_overlap(build: Build) -> Technique:
    updates = build.find(InBackward)
    assert updates is not None
    return enable_update_overlap(build.parts, updates)


def _can_overlap(build: Build) -> bool:
    """Check whether weights' updates can wait for the next forward, and nothing else moves or shards the weights."""
    updates = build.find(InBackward)
    waits = updates is not None and updates.overlaps and build.reads_weights_flushed
    return waits and build.find(ParameterStreaming) is None and build.find(FullySharded) is None


def _adds_adapters(build: Build) -> bool:
    return build.recipe.adapter.name == "lora" and not build.has_adapters


def _refuse_mean_of_means(model: Any) -> None:
    """Refuse a model whose own loss ignores the window's token count.

    Args:
        model: a causal LM, or a PEFT model around one, without a chunked loss.

    Raises:
        ModelError: if its forward does not take ``num_items_in_batch``.
    """
    takes_any = any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD
        for parameter in inspect.signature(model.forward).parameters.values()
    )
    if not takes_any or getattr(model, "accepts_loss_kwargs", None) is False:
        raise ModelError(
            "loss.chunk_tokens=null needs a model whose own loss takes num_items_in_batch, but that of "
            f"{type(model).__name__} does not: it would weight tokens by the size of their micro-batch. Set "
            "loss.chunk_tokens=1024."
        )


ADAPTERS = (
    Spec(_adds_adapters, _lora),
    Spec(_adds_adapters, _refuse_untrained_rows),
)
"""Adapters are added to a model before anything changes its forward."""

FORWARD = (
    Spec(lambda build: build.recipe.model.kernels != "none", _fused_operators),
    Spec(
        lambda build: build.recipe.adapter.name == "lora",
        lambda build: enable_fused_adapters(build.parts, build.recipe.adapter),
    ),
    Spec(
        lambda build: build.recipe.tiling.mlp > 1,
        lambda build: enable_tiled_mlp(build.parts, build.recipe.tiling),
    ),
    Spec(lambda build: build.recipe.checkpointing.mlp_activation != "keep", _recomputed_activations),
    Spec(
        lambda build: build.recipe.checkpointing.mode != "none",
        lambda build: enable_checkpointing(build.parts, build.recipe.checkpointing),
    ),
    Spec(
        lambda build: build.recipe.offload.activations != "none",
        lambda build: enable_activation_offload(build.parts, build.recipe.offload, build.host_memory),
    ),
    Spec(lambda build: build.recipe.accumulation.order == "vertical", _vertical_accumulation),
    Spec(
        lambda build: build.recipe.loss.chunk_tokens is None and not build.computes_loss,
        lambda build: _refuse_mean_of_means(build.model),
    ),
    Spec(lambda build: build.recipe.loss.chunk_tokens is not None, _chunked_loss),
    Spec(lambda build: build.recipe.offload.parameters == "stream", _parameter_streaming),
)
"""Techniques that change the model's forward, from the inside out."""

SHARDING = (
    Spec(lambda build: build.recipe.distributed.plan().shards_rows, lambda build: build.shard(build.parts)),
    Spec(
        lambda build: build.find(FullySharded) is not None and build.find(ChunkedLoss) is not None,
        _compare_sharded_loss,
    ),
)
"""Weights are sharded around all of these; for an engine's run they are the last."""

STATE = (
    Spec(
        lambda build: (
            build.recipe.offload.optimizer == "host" and isinstance(build.optimizer, ChunkedOptimizer)
        ),
        lambda build: enable_optimizer_offload(build.optimizer, build.host_memory),
    ),
)
"""Techniques that decide where the optimizer allocates its state, while the weights are at rest."""

SUMS = (
    Spec(
        lambda build: build.recipe.accumulation.dtype == "float32" and build.sums_gradients,
        _float32_accumulation,
    ),
    Spec(lambda build: build.recipe.accumulation.fusion, _fused_accumulation),
)
"""Techniques that sum the gradients of several micro-batches; a run of one gets them once memory has run out."""

STEP = (
    *SUMS,
    Spec(
        lambda build: may_lose_updates(build.optimizer),
        lambda build: enable_lost_update_meter(build.optimizer),
    ),
    Spec(lambda build: build.recipe.optimizer.in_backward, _optimizer_in_backward),
    Spec(_can_overlap, _update_overlap),
)
"""Techniques that sum, watch and apply gradients."""
