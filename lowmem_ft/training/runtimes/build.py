"""Construction of a session from a recipe: what is planned, loaded, enabled and wrapped, in that order.

Steps that can fail fast come first: precision and attention, then tokenizer and data, and only then the weights, and
the techniques around them (:mod:`lowmem_ft.training.step.enabled_techniques`). Accelerate wraps last.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from pathlib import Path

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from lowmem_ft.foundation.devices import has_bfloat16, kernels_of, name_of
from lowmem_ft.foundation.errors import raise_problems
from lowmem_ft.foundation.host.pinned_memory import HostMemory
from lowmem_ft.foundation.tensors.logical_size import num_parameters
from lowmem_ft.models.files.stored_quantization import packing_problem, problems_of_training
from lowmem_ft.models.hf_config import compute_dtype, other_parts_of, weights_dtype
from lowmem_ft.models.loading import model_of_config
from lowmem_ft.models.quantizing.stored_quantizers import packed_format
from lowmem_ft.optimizers import check_optimizer
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.reading.keys import key_with
from lowmem_ft.recipe.rules.engine_rules import problems_with_processes
from lowmem_ft.techniques.adapters.config import AdapterConfig
from lowmem_ft.techniques.adapters.lora import check_adapter, check_names
from lowmem_ft.techniques.attention.choose_attention import AttentionChoice, choose_attention
from lowmem_ft.techniques.loss.router_loss import log_router_loss
from lowmem_ft.techniques.precision_check import check_precision
from lowmem_ft.training.runtimes.runtime import Runtime
from lowmem_ft.training.step.enabled_techniques import Build, enable_techniques
from lowmem_ft.training.step.session import Session

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
    hf_config = hf_config or runtime.values.load_config(recipe.model)
    dtype = weights_dtype(recipe.model, hf_config)
    recipe.model.require_packages()
    check_adapter(recipe.adapter)
    _refuse_to_train_packed(recipe, hf_config)
    check_precision(
        str(dtype).removeprefix("torch."),
        recipe.training.mixed_precision,
        runtime.machine.device,
        frozen=not recipe.adapter.trains_model_weights,
        scales_loss=key_with(recipe, "no loss scale") is None,
    )
    check_optimizer(recipe.optimizer, runtime.machine.device)
    raise_problems(problems_with_processes(recipe, runtime.ranks.num_processes))
    attention = choose_attention(
        recipe.model.attn_implementation,
        config=hf_config,
        device=runtime.machine.device,
        compute_dtype=compute_dtype(dtype, recipe.training.mixed_precision),
        packing=recipe.data.packing,
        context=runtime.ranks.plan.context,
    )
    logger.info("Attention: %s (%s).", attention.implementation, attention.reason)
    if compute_dtype(dtype, recipe.training.mixed_precision) == torch.float32:
        _log_float32(recipe, runtime.machine.device)
    return Plan(hf_config=hf_config, attention=attention)


def refuse_unknown_names(recipe: Recipe, plan: Plan) -> None:
    """Reject names of layers and modules that the model lacks, by the model without weights.

    Tokenizing the data and loading the weights may take long; both are in vain if a name is misspelt.

    Raises:
        UserError: if ``adapter.target_modules``, ``target_parameters`` or ``modules_to_save`` holds such a name.
    """
    adapter, default = recipe.adapter, AdapterConfig()
    named = (adapter.target_modules, adapter.target_parameters, adapter.modules_to_save)
    if named == (default.target_modules, default.target_parameters, default.modules_to_save):
        return
    # Making a model draws random numbers, and may write into its config.
    with torch.random.fork_rng(devices=[]):
        hf_config, attention = copy.deepcopy(plan.hf_config), plan.attention.implementation
        model = model_of_config(recipe.model, hf_config, attention, torch.device("meta"))
    check_names(model, adapter, other_parts_of(recipe.model))


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
    host_memory = runtime.machine.host_memory(recipe.budget, recipe.offload.folder)
    model = runtime.values.load_model(
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
    enabled = enable_techniques(
        Build(
            model=model,
            recipe=recipe,
            host_memory=host_memory,
            rows_per_micro_batch=_rows_per_micro_batch(recipe, plan),
            sums=in_pieces or recipe.training.gradient_accumulation_steps > 1,
            full_precision_weights=lambda: runtime.values.master_weights(recipe.model, plan.hf_config),
            shard=lambda parts: runtime.ranks.shard(parts, recipe.distributed),
            context_mesh=runtime.ranks.context_mesh,
            reads_weights_flushed=True,
        )
    )
    scheduler = runtime.values.schedule(enabled.optimizer, recipe.training, num_training_steps)
    prepared_model, prepared_optimizer = runtime.ranks.prepare(model, enabled.optimizer)
    _log_size(model)
    log_router_loss(model)
    return Session(
        model=prepared_model,
        unwrapped_model=model,
        optimizer=prepared_optimizer,
        scheduler=scheduler,
        runtime=runtime,
        max_grad_norm=recipe.training.max_grad_norm,
        techniques=enabled.techniques,
        host_memory=host_memory,
    )


def _rows_per_micro_batch(recipe: Recipe, plan: Plan) -> int:
    """Return the collator's rows per micro-batch: for flash attention, one row joins all packed documents."""
    in_one_row = recipe.data.packing and "flash" in plan.attention.implementation
    return 1 if in_one_row else recipe.training.per_device_train_batch_size


def _log_size(model: nn.Module) -> None:
    total, trainable = num_parameters(model)
    logger.info(
        "%s: %s parameters, %s of them trainable.", type(model).__name__, f"{total:,}", f"{trainable:,}"
    )
