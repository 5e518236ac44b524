"""Construction of a session from a recipe: the one ordered list of what is read, chosen, enabled and wrapped.

The order matters and is defined here alone. Steps that can fail fast come first: precision and attention, then
tokenizer and data, and only then the weights. Techniques that change the model's forward come before the optimizer sees
its parameters, from the inside out: MLP tiles are inside a checkpointed layer, which is inside the loop over
micro-batches, which is inside the visit of streamed weights. Accelerate wraps last.

A technique joins a run by its entry in :func:`techniques_in_forward`, :func:`techniques_of_state` or
:func:`techniques_in_step`, and nowhere else; other training loops enable techniques through the same functions.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PretrainedConfig, PreTrainedModel

from lowmem_ft.foundation.devices import has_bfloat16, kernels_of, name_of
from lowmem_ft.foundation.errors import ModelError, raise_problems
from lowmem_ft.foundation.handle import Handle
from lowmem_ft.host.pinned_memory import HostMemory
from lowmem_ft.models.files.hub_names import hub_id_of
from lowmem_ft.models.files.stored_quantization import packing_problem, problems_of_training
from lowmem_ft.models.loading import compute_dtype, weights_dtype
from lowmem_ft.models.master_weights import MasterWeights
from lowmem_ft.models.new_tokens import refuse_untrained_rows
from lowmem_ft.models.other_parts import other_parts
from lowmem_ft.models.quantizing.stored_quantizers import packed_format
from lowmem_ft.optimizers import (
    ChunkedOptimizer,
    check_optimizer,
    create_optimizer,
    create_torch_adamw,
    may_lose_updates,
)
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.reading.keys import key_with
from lowmem_ft.techniques.accumulation.float32_accumulation import enable_float32_accumulation
from lowmem_ft.techniques.accumulation.fused_accumulation import enable_fused_accumulation
from lowmem_ft.techniques.accumulation.vertical_accumulation import enable_vertical_accumulation
from lowmem_ft.techniques.adapters.fused_adapter import enable_fused_adapters
from lowmem_ft.techniques.adapters.lora import check_adapter, enable_lora
from lowmem_ft.techniques.attention.choose_attention import AttentionChoice, choose_attention
from lowmem_ft.techniques.checkpointing.checkpointed_layers import enable_checkpointing
from lowmem_ft.techniques.distributed.fully_sharded import FullySharded
from lowmem_ft.techniques.kernels.fused_operators import enable_fused_operators
from lowmem_ft.techniques.loss.chunked_loss import ChunkedLoss, enable_chunked_loss
from lowmem_ft.techniques.loss.router_loss import log_router_loss
from lowmem_ft.techniques.offload.activation_offload import enable_activation_offload
from lowmem_ft.techniques.offload.optimizer_offload import enable_optimizer_offload
from lowmem_ft.techniques.optimizer_in_backward import enable_optimizer_in_backward
from lowmem_ft.techniques.precision import check_precision, enable_lost_update_meter
from lowmem_ft.techniques.streaming.parameter_streaming import ParameterStreaming, enable_parameter_streaming
from lowmem_ft.techniques.technique import Technique, Techniques
from lowmem_ft.techniques.tiling.tiled_mlp import enable_tiled_mlp
from lowmem_ft.techniques.update_overlap import enable_update_overlap
from lowmem_ft.tensors.finiteness import some_of
from lowmem_ft.tensors.local_shards import first_element, whole_shape
from lowmem_ft.tensors.logical_size import logical_numel
from lowmem_ft.training.distributed.distributed_rules import problems_with_processes
from lowmem_ft.training.runtime import Runtime
from lowmem_ft.training.session import Session

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The decisions made before any weight is read.

    Args:
        hf_config: the architecture.
        attention: the attention kernel and the reason for it.
    """

    hf_config: PretrainedConfig
    attention: AttentionChoice


def resumed(recipe: Recipe, checkpoint: Path) -> Recipe:
    """Return the recipe with architecture, weights and tokenizer from a checkpoint instead of their original source.

    A checkpoint of adapters holds only their weights and the tokenizer: the model still comes from its own source.
    """
    if recipe.adapter.name != "none":
        model = dataclasses.replace(recipe.model, tokenizer_name_or_path=str(checkpoint))
        return dataclasses.replace(recipe, model=model)
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
    """Read the architecture, check the device's capabilities, choose the attention kernel.

    Args:
        recipe: the recipe to plan for.
        runtime: its device and processes.
        hf_config: the architecture, if it has been read already.

    Returns:
        The plan.

    Raises:
        UserError: if the device cannot run the recipe.
        ModelError: if there is no such model.
    """
    hf_config = hf_config or runtime.load_config(recipe.model)
    dtype = weights_dtype(recipe.model, hf_config)
    recipe.model.require_packages()
    check_adapter(recipe.adapter)
    _refuse_to_train_packed(recipe, hf_config)
    check_precision(
        str(dtype).removeprefix("torch."),
        recipe.training.mixed_precision,
        runtime.device,
        frozen=not recipe.adapter.trains_model_weights,
        scales_loss=key_with(recipe, "no loss scale") is None,
    )
    check_optimizer(recipe.optimizer, runtime.device)
    raise_problems(problems_with_processes(recipe, runtime.num_processes))
    attention = choose_attention(
        recipe.model.attn_implementation,
        config=hf_config,
        device=runtime.device,
        compute_dtype=compute_dtype(dtype, recipe.training.mixed_precision),
        packing=recipe.data.packing,
    )
    logger.info("Attention: %s (%s).", attention.implementation, attention.reason)
    if compute_dtype(dtype, recipe.training.mixed_precision) == torch.float32:
        _log_float32(recipe, runtime.device)
    return Plan(hf_config=hf_config, attention=attention)


def _refuse_to_train_packed(recipe: Recipe, hf_config: PretrainedConfig) -> None:
    """Refuse what a rule refuses, too, where it can read the config: that of a model on the hub is known only now."""
    stored, quantization = packed_format(hf_config), recipe.model.quantization
    if stored is not None and quantization != "dequantize":
        name, strategy = recipe.model.name_or_path or "", recipe.distributed.strategy
        twice = packing_problem(stored, quantization, name)
        adapter = recipe.adapter
        problems = problems_of_training(stored, name, adapter.name, strategy, use_dora=adapter.use_dora)
        raise_problems([*([twice] if twice else []), *problems])


def _log_float32(recipe: Recipe, device: torch.device) -> None:
    """Log that a run computes in float32 if its GPU supports bfloat16: the recipe may not have asked for float32."""
    if kernels_of(device) != "cuda" or not has_bfloat16(device):
        return
    checkpointing = (
        "" if recipe.checkpointing.mode != "none" else " without checkpointing (checkpointing.mode=full)"
    )
    logger.info(
        "Weights and products are float32%s. On %s training.mixed_precision=bf16, or model.dtype=bfloat16 "
        "optimizer.master=split24, needs less memory and is faster; `lowmem-ft plan` chooses.",
        checkpointing,
        name_of(device),
    )


def load_planned_model(recipe: Recipe, runtime: Runtime, plan: Plan) -> tuple[PreTrainedModel, HostMemory]:
    """Load a recipe's model where its weights are to be; return it with the host memory that techniques share."""
    host_memory = runtime.host_memory(recipe.budget, recipe.offload.folder)
    model = runtime.load_model(
        recipe.model,
        plan.hf_config,
        attn_implementation=plan.attention.implementation,
        seed=recipe.training.seed,
        host=host_memory if key_with(recipe, "weights on host") else None,
    )
    return model, host_memory


def build_session(
    recipe: Recipe, runtime: Runtime, plan: Plan, *, num_training_steps: int, in_pieces: bool = False
) -> Session:
    """Load the weights, enable the recipe's techniques, make the optimizer and its schedule, wrap them.

    Args:
        recipe: the recipe to build.
        runtime: its device and processes.
        plan: the result of :func:`plan_session`.
        num_training_steps: optimizer steps in all, for the learning rate's schedule.
        in_pieces: whether micro-batches will be split: then even a single one is summed as several are.

    Returns:
        A session ready to train; the optimizer's state is fresh (see ``checkpoint.load_checkpoint``).
    """
    model, host_memory = load_planned_model(recipe, runtime, plan)
    model.train()
    on = switch_on(
        model,
        recipe,
        host_memory,
        adapters=_adapters_of(model, recipe),
        rows_per_micro_batch=_rows_per_micro_batch(recipe, plan),
        sums=in_pieces or recipe.training.gradient_accumulation_steps > 1,
        finer_weights=lambda: runtime.master_weights(recipe.model, plan.hf_config),
        shard=lambda: runtime.shard(model, recipe.distributed),
        reads_weights_flushed=True,
    )
    scheduler = runtime.schedule(on.optimizer, recipe.training, num_training_steps)
    prepared_model, prepared_optimizer = runtime.prepare(model, on.optimizer)
    _log_size(model)
    log_router_loss(model)
    return Session(
        model=prepared_model,
        unwrapped_model=model,
        optimizer=prepared_optimizer,
        scheduler=scheduler,
        runtime=runtime,
        max_grad_norm=recipe.training.max_grad_norm,
        techniques=on.techniques,
        host_memory=host_memory,
    )


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
        adapters: from :func:`_adapters_of`; empty for a model that already has its adapters.
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
        streaming = in_forward.find(ParameterStreaming)
        sharded = in_forward.find(FullySharded)
        loss = in_forward.find(ChunkedLoss)
        for technique in techniques_in_step(
            model,
            optimizer,
            recipe,
            host_memory,
            streaming,
            sharded,
            loss,
            sums=sums,
            reads_weights_flushed=reads_weights_flushed,
        ):
            after_forward.add(technique)
    except BaseException:
        Handle(in_forward.remove, after_forward.remove).remove()
        raise
    # Streamed weights are outermost: they apply deferred updates, and come to rest before the state returns.
    return SwitchedOn(optimizer, Techniques(*after_forward, *in_forward))


def _adapters_of(model: PreTrainedModel, recipe: Recipe) -> Iterator[Technique]:
    """Yield the recipe's adapters, added to a model before anything that changes its forward."""
    if recipe.adapter.name == "lora":
        base_name = hub_id_of(recipe.model.name_or_path or "")
        yield enable_lora(
            model,
            recipe.adapter,
            base_name=base_name,
            base_revision=recipe.model.revision,
            whole=other_parts(model),
        )
        refuse_untrained_rows(model, recipe.model)


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


def techniques_in_step(
    model: PreTrainedModel,
    optimizer: Optimizer,
    recipe: Recipe,
    host_memory: HostMemory,
    streaming: ParameterStreaming | None,
    sharded: FullySharded | None = None,
    loss: ChunkedLoss | None = None,
    *,
    sums: bool,
    reads_weights_flushed: bool,
) -> Iterator[Technique]:
    """Enable the techniques that sum, apply and watch gradients, those of streamed weights included."""
    if recipe.accumulation.dtype == "float32" and (sums or sharded is not None):
        if sharded is not None:
            sharded.sum_in_float32(several_in_backward=recipe.accumulation.order == "vertical")
        takes_float32 = isinstance(optimizer, ChunkedOptimizer)
        yield enable_float32_accumulation(optimizer, takes_float32=takes_float32)
        if recipe.accumulation.fusion:
            yield enable_fused_accumulation(model, device=host_memory.device, loss=loss)
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
    parameters = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state and optimizer.master_of(parameter).tensors
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


def _rows_per_micro_batch(recipe: Recipe, plan: Plan) -> int:
    """Return the collator's rows per micro-batch: for flash attention, one row joins all packed documents."""
    in_one_row = recipe.data.packing and "flash" in plan.attention.implementation
    return 1 if in_one_row else recipe.training.per_device_train_batch_size


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


def _log_size(model: nn.Module) -> None:
    total = sum(map(logical_numel, model.parameters()))
    trainable = sum(logical_numel(parameter) for parameter in model.parameters() if parameter.requires_grad)
    logger.info(
        "%s: %s parameters, %s of them trainable.", type(model).__name__, f"{total:,}", f"{trainable:,}"
    )
