"""Estimate of an evaluation of a saved model: its forward passes, traced on a virtual device as a step is."""

from __future__ import annotations

import json
import time
from pathlib import Path

from transformers import PreTrainedModel

from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.foundation.system.garbage_collector import collector_paused
from lowmem_ft.models.hf_config import load_model_config, vocab_size
from lowmem_ft.models.other_parts import other_parts
from lowmem_ft.planning.estimator.device_target import choose_gpu
from lowmem_ft.planning.estimator.estimate import estimate_of_trace
from lowmem_ft.planning.estimator.runtime import virtual_runtime
from lowmem_ft.planning.estimator.traces.traced_recipe import TracedRecipe
from lowmem_ft.planning.estimator.traces.tracing import copied_weight_bytes, mark_weight_memory
from lowmem_ft.planning.estimator.worst_batch import row_length, worst_batch
from lowmem_ft.recipe import Recipe
from lowmem_ft.techniques.adapters.adapter_folder import CONFIG_FILE
from lowmem_ft.techniques.adapters.config import AdapterConfig
from lowmem_ft.techniques.adapters.lora import enable_lora
from lowmem_ft.training.export.forward_session import build_forward_session
from lowmem_ft.training.runtimes.build import plan_session
from lowmem_ft.training.step.step import evaluation_loss
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.tracing_machine import TracingMachine


@collector_paused()
def estimate_evaluation(
    recipe: Recipe, gpu: str | Gpu | None = None, *, adapter: Path | None = None
) -> MemoryEstimate:
    """Estimate what the evaluation of a model needs: all of its layers are traced, once.

    Args:
        recipe: from :func:`lowmem_ft.training.export.model_source.forward_recipe`; rows have ``data.max_length``.
        gpu: the device, as for :func:`lowmem_ft.estimate_memory`.
        adapter: the folder of an adapter; None: it is a whole model.

    Returns:
        The estimate.

    Raises:
        UserError: if the catalogue has no such GPU, or the device cannot run it.
        ModelError: if the model cannot be found, or its forward cannot be traced.
    """
    start = time.perf_counter()
    spec, reason = choose_gpu(gpu, recipe.budget, use_cpu=recipe.training.use_cpu)
    machine = TracingMachine() if spec is None else VirtualGPU(spec)
    hf_config = load_model_config(recipe.model, architecture_only=True)
    training = recipe.training
    rows = training.per_device_eval_batch_size or training.per_device_train_batch_size
    with machine:
        runtime = virtual_runtime(machine, training)
        plan = plan_session(recipe, runtime, hf_config)
        add_adapter = None if adapter is None else lambda model: _add_fresh(model, adapter)
        with machine.during("load"):
            session = build_forward_session(recipe, runtime, plan, add_adapter=add_adapter)
        mark_weight_memory(session.techniques, machine)
        batch = worst_batch(recipe, hf_config, rows, attn_implementation=plan.attention.implementation)
        with machine.during("evaluation"):
            evaluation_loss(session, [batch])
    length = row_length(recipe, hf_config)
    traced = TracedRecipe(
        trace=machine.trace(recipe.model.name_or_path or ""),
        tokens_per_micro_batch=rows * length,
        batch=f"{rows} x {length} tokens",
        vocabulary_size=vocab_size(hf_config) or 0,
        copied_weight_bytes=copied_weight_bytes(session.techniques),
    )
    return estimate_of_trace(recipe, traced, spec, recipe.budget, time.perf_counter() - start, reason)


def _add_fresh(model: PreTrainedModel, adapter: Path) -> None:
    """Add an adapter of the same sizes, whose values no trace reads."""
    settings = json.loads((adapter / CONFIG_FILE).read_text("utf-8"))
    targets = settings.get("target_modules") or []
    is_pattern = isinstance(targets, str)
    config = AdapterConfig(
        name="lora",
        r=settings["r"],
        target_modules=("all-linear",) if is_pattern else tuple(targets),
        target_parameters=tuple(settings.get("target_parameters") or ()),
        use_dora=bool(settings.get("use_dora")),
    )
    enable_lora(model, config, whole=other_parts(model))
    model.requires_grad_(False)
