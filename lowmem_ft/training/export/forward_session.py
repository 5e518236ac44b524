"""A saved model built for forward passes alone: streamed, packed and tiled as in training, without an optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from lowmem_ft.models.other_parts import other_parts
from lowmem_ft.recipe import Recipe
from lowmem_ft.techniques.adapters.config import AdapterConfig
from lowmem_ft.techniques.adapters.saved_adapter import add_saved_adapter
from lowmem_ft.training.export.adapter_rows import resize_for_adapter
from lowmem_ft.training.runtimes.build import Plan, load_planned_model
from lowmem_ft.training.runtimes.runtime import Runtime
from lowmem_ft.training.step.enabled_techniques import FORWARD, Build
from lowmem_ft.training.step.session import ForwardSession


def runtime_of(recipe: Recipe) -> Runtime:
    """Return one process on this machine's GPU, or on its processor if it has none or ``training.use_cpu`` is set."""
    on_gpu = torch.cuda.is_available() and not recipe.training.use_cpu
    return Runtime.in_one_process(torch.device("cuda" if on_gpu else "cpu"), recipe.training.mixed_precision)


def saved_adapter(folder: Path | None) -> Callable[[PreTrainedModel], object] | None:
    """Return what adds the adapter of a folder to its base; None: there is no adapter."""
    if folder is None:
        return None

    def add(model: PreTrainedModel) -> object:
        resize_for_adapter(model, folder, model.name_or_path or "")
        return add_saved_adapter(model, folder, other_parts(model))

    return add


def build_forward_session(
    recipe: Recipe, runtime: Runtime, plan: Plan, *, add_adapter: Callable[[PreTrainedModel], object] | None
) -> ForwardSession:
    """Load a model, add its adapter, and enable the recipe's techniques; nothing of it is trained.

    Args:
        recipe: from :func:`lowmem_ft.training.export.model_source.forward_recipe`.
        runtime: its device.
        plan: the result of ``plan_session``.
        add_adapter: adds an adapter to the model; None: it is a whole model.

    Returns:
        The session, its model in eval mode.
    """
    model, host_memory = load_planned_model(recipe, runtime, plan)
    model.requires_grad_(False)
    if add_adapter is not None:
        add_adapter(model)
    adapter = recipe.adapter if add_adapter is not None else AdapterConfig()
    of_model = dataclasses.replace(recipe, adapter=adapter)
    build = Build(model=model, recipe=of_model, host_memory=host_memory)
    build.enable(FORWARD, build.in_forward)
    model.eval()
    return ForwardSession(
        model=model,
        unwrapped_model=model,
        runtime=runtime,
        techniques=build.in_forward,
        host_memory=host_memory,
    )
