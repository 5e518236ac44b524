"""The techniques of a recipe: the one ordered list of what is enabled around a model and its optimizer.

The order matters and is defined here alone. Techniques that change the model's forward come before the optimizer sees
its parameters, from the inside out: MLP tiles are inside a checkpointed layer, which is inside the loop over
micro-batches, which is inside the visit of streamed weights.

A technique joins a run by its entry in :func:`techniques_in_forward`, :func:`techniques_of_state` or
:func:`techniques_in_step`, and nowhere else; other training loops enable techniques through the same functions.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.foundation.handle import Handle
from lowmem_ft.foundation.host.pinned_memory import HostMemory
from lowmem_ft.foundation.tensors.finiteness import some_of
from lowmem_ft.foundation.tensors.local_shards import first_element, whole_shape
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
from lowmem_ft.techniques.adapters.trained_rows import trained_parameters
from lowmem_ft.techniques.checkpointing.checkpointed_layers import enable_checkpointing
from lowmem_ft.techniques.checkpointing.recomputed_activation import enable_recomputed_activations
from lowmem_ft.techniques.distributed.fully_sharded import FullySharded
from lowmem_ft.techniques.kernels.fused_operators import enable_fused_operators
from lowmem_ft.techniques.loss.chunked_loss import ChunkedLoss, enable_chunked_loss
from lowmem_ft.techniques.offload.activation_offload import enable_activation_offload
from lowmem_ft.techniques.offload.optimizer_offload import enable_optimizer_offload
from lowmem_ft.techniques.optimizer_in_backward import enable_optimizer_in_backward
from lowmem_ft.techniques.precision import enable_lost_update_meter
from lowmem_ft.techniques.streaming.parameter_streaming import ParameterStreaming, enable_parameter_streaming
from lowmem_ft.techniques.technique import Technique, Techniques
from lowmem_ft.techniques.tiling.tiled_mlp import enable_tiled_mlp
from lowmem_ft.techniques.update_overlap import enable_update_overlap

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class SwitchedOn:
    """The optimizer and the enabled techniques with which a recipe trains a model.

    Args:
        optimizer: lowmem_ft's or bitsandbytes', or torch's AdamW for an engine, over the trainable parameters.
        techniques: the enabled techniques, for a training loop to call.
    """

    optimizer: Optimizer
    techniques: Techniques


def switch_on(
    model: PreTrainedModel,
    recipe: Recipe,
    host_memory: HostMemory,
    *,
    adapters: Iterable[Technique] = (),
    rows_per_micro_batch: int,
    sums: bool,
    finer_weights: Callable[[], MasterWeights | None],
    shard: Callable[[], FullySharded | None] = lambda: None,
    reads_weights_flushed: bool = False,
) -> SwitchedOn:
    """Enable a recipe's techniques, in their order, and make the optimizer between them.

    Args:
        model: a causal LM, or a PEFT model around one.
        recipe: names the techniques and the optimizer.
        host_memory: holds offloaded tensors.
        adapters: from :func:`adapters_of`; empty for a model that already has its adapters.
        rows_per_micro_batch: in vertical order, the rows that pass through a layer together.
        sums: whether a step sums several gradients.
        finer_weights: reads the checkpoint's weights in full if the model's bfloat16 weights have lost bits.
        shard: shards the model's parameters over several processes, if they share them.
        reads_weights_flushed: whether the loop calls ``techniques.flush()`` before anyone reads weights between two
            steps, so that updates of weights on the device may also be deferred to the next forward. In other loops,
            a user's callbacks would read the weights of the previous step.

    Returns:
        The optimizer and the techniques; an error leaves the model unchanged.
    """
    in_forward, after_forward = Techniques(), Techniques()
    try:
        for technique in itertools.chain(
            adapters, techniques_in_forward(model, recipe, host_memory, rows_per_micro_batch)
        ):
            in_forward.add(technique)
        if sharded := shard():
            in_forward.add(sharded)
            if loss := in_forward.find(ChunkedLoss):
                loss.compare_with_stock()
                sharded.reshard()
                sharded.spare_head_in_backward()
        training = recipe.training
        if recipe.distributed.has_engine:
            optimizer = create_torch_adamw(model, recipe.optimizer, learning_rate=training.learning_rate)
            return SwitchedOn(optimizer, in_forward)
        optimizer = create_optimizer(
            model, recipe.optimizer, learning_rate=training.learning_rate, seed=training.seed
        )
        with in_forward.at_rest():  # the state begins with the weights' values
            for technique in techniques_of_state(optimizer, recipe, host_memory):
                after_forward.add(technique)
            _initialize_masters(optimizer, model, finer_weights)
        for technique in techniques_in_step(
            model,
            optimizer,
            recipe,
            host_memory,
            in_forward,
            sums=sums,
            reads_weights_flushed=reads_weights_flushed,
        ):
            after_forward.add(technique)
    except BaseException:
        Handle(in_forward.remove, after_forward.remove).remove()
        raise
    # Streamed weights are outermost: they apply deferred updates, and come to rest before the state returns.
    return SwitchedOn(optimizer, Techniques(*after_forward, *in_forward))


def adapters_of(model: PreTrainedModel, recipe: Recipe) -> Iterator[Technique]:
    """Yield the recipe's adapters, added to a model before anything that changes its forward."""
    if recipe.adapter.name == "lora":
        base_name = hub_id_of(recipe.model.name_or_path or "")
        yield enable_lora(
            model,
            recipe.adapter,
            base_name=base_name,
            base_revision=recipe.model.revision,
            whole=other_parts(model),
            new_rows=new_rows(model),
        )
        refuse_untrained_rows(model, recipe.model, trained_alone=recipe.adapter.train_new_tokens)


def techniques_in_forward(
    model: PreTrainedModel, recipe: Recipe, host_memory: HostMemory, rows_per_micro_batch: int
) -> Iterator[Technique]:
    """Enable the techniques that change the model's forward, from the inside out."""
    if recipe.model.kernels != "none":
        compute = compute_dtype(model.dtype, recipe.training.mixed_precision)
        yield enable_fused_operators(
            model, recipe.model.kernels, device=host_memory.device, compute_dtype=compute
        )
    if recipe.adapter.name == "lora":
        yield enable_fused_adapters(model, recipe.adapter)
    if recipe.tiling.mlp > 1:
        yield enable_tiled_mlp(model, recipe.tiling)
    if recipe.checkpointing.mlp_activation != "keep" and recipe.tiling.mlp > 1:
        logger.info("MLPs: tiles compute all of them again, and checkpointing.mlp_activation nothing more.")
    elif recipe.checkpointing.mlp_activation != "keep":
        yield enable_recomputed_activations(model, recipe.checkpointing, device=host_memory.device)
    if recipe.checkpointing.mode != "none":
        yield enable_checkpointing(model, recipe.checkpointing)
    if recipe.offload.activations != "none":
        yield enable_activation_offload(model, recipe.offload, host_memory)
    if recipe.accumulation.order == "vertical":
        keeps_inputs_alone = recipe.checkpointing.mode == "full"
        yield enable_vertical_accumulation(model, rows_per_micro_batch, keeps_inputs_alone=keeps_inputs_alone)
    loss = None
    if recipe.loss.chunk_tokens is None:
        _refuse_mean_of_means(model)
    else:
        loss = enable_chunked_loss(
            model,
            recipe.loss,
            recipe.tiling,
            device=host_memory.device,
            compare=recipe.distributed.strategy != "fsdp2",  # sharding loads the weights later
        )
        assert isinstance(loss, ChunkedLoss), "there is a chunk size"
        yield loss
    if recipe.offload.parameters == "stream":
        yield enable_parameter_streaming(
            model,
            recipe.offload,
            device=host_memory.device,
            host=host_memory,
            trained=recipe.adapter.name == "none",
            loss=loss,
        )


def techniques_of_state(optimizer: Optimizer, recipe: Recipe, host_memory: HostMemory) -> Iterator[Technique]:
    """Allocate the optimizer's state, on the host if offloaded; bitsandbytes' optimizers do so in their first step."""
    if not isinstance(optimizer, ChunkedOptimizer):
        return
    if recipe.offload.optimizer == "host":
        yield enable_optimizer_offload(optimizer, host_memory)
    optimizer.allocate_state()


def techniques_of_sums(
    model: nn.Module,
    optimizer: Optimizer,
    recipe: Recipe,
    *,
    device: torch.device,
    loss: ChunkedLoss | None,
) -> Iterator[Technique]:
    """Enable the techniques that sum the gradients of several micro-batches."""
    if recipe.accumulation.dtype == "float32":
        takes_float32 = isinstance(optimizer, ChunkedOptimizer)
        yield enable_float32_accumulation(optimizer, takes_float32=takes_float32)
    if recipe.accumulation.fusion:
        yield enable_fused_accumulation(model, device=device, loss=loss)


def techniques_in_step(
    model: PreTrainedModel,
    optimizer: Optimizer,
    recipe: Recipe,
    host_memory: HostMemory,
    in_forward: Techniques,
    *,
    sums: bool,
    reads_weights_flushed: bool,
) -> Iterator[Technique]:
    """Enable the techniques that sum, apply and watch gradients, those of streamed weights included."""
    streaming, sharded = in_forward.find(ParameterStreaming), in_forward.find(FullySharded)
    if sharded is not None and recipe.accumulation.dtype == "float32":
        sharded.sum_in_float32(several_in_backward=recipe.accumulation.order == "vertical")
    if sums or sharded is not None:
        loss = in_forward.find(ChunkedLoss)
        yield from techniques_of_sums(model, optimizer, recipe, device=host_memory.device, loss=loss)
    elif recipe.accumulation.fusion:
        logger.info("Accumulation: a step has one micro-batch, and accumulation.fusion nothing to sum.")
    if may_lose_updates(optimizer):
        yield enable_lost_update_meter(optimizer)
    if recipe.optimizer.in_backward:
        assert isinstance(optimizer, ChunkedOptimizer), "the recipe's rules reject others"
        memory = host_memory if recipe.offload.optimizer == "host" else None
        max_grad_norm = recipe.training.max_grad_norm
        in_backward = enable_optimizer_in_backward(
            optimizer, device=host_memory.device, max_grad_norm=max_grad_norm, memory=memory
        )
        if streaming is not None:
            streaming.update_with(in_backward)
        yield in_backward
        if reads_weights_flushed and in_backward.overlaps and streaming is None and sharded is None:
            yield enable_update_overlap(model, in_backward)


def _initialize_masters(
    optimizer: Optimizer, model: nn.Module, finer_weights: Callable[[], MasterWeights | None]
) -> None:
    """Initialize the masters of bfloat16 weights with the bits of a float32 checkpoint that the weights have lost."""
    if not isinstance(optimizer, ChunkedOptimizer):
        return
    drawn = trained_parameters(model)  # by the run: no checkpoint has finer ones
    parameters = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state and optimizer.master_of(parameter).tensors and parameter not in drawn
    }
    finer = finer_weights() if parameters else None
    if finer is None:
        return
    for name, parameter in parameters.items():
        if finer.has(name, whole_shape(parameter)):
            optimizer.set_weights(parameter, _of_this_process(parameter, finer.values(name)))
        else:
            finer.changed.add(name)
    but = f", except for {some_of(sorted(finer.changed))}, which have changed since" if finer.changed else ""
    logger.info("Masters begin with the checkpoint's weights, which are finer than bfloat16%s.", but)


def _of_this_process(
    parameter: nn.Parameter, values: Callable[[int, int], Tensor]
) -> Callable[[int, int], Tensor]:
    """Turn a reader of a whole parameter into one of the elements that this process holds."""
    first = first_element(parameter)
    return lambda start, stop: values(first + start, first + stop)


def _refuse_mean_of_means(model: PreTrainedModel) -> None:
    """Refuse a model whose own loss ignores the window's token count: it would average over each micro-batch."""
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
