"""Target of a plan: the device, the memory available, the model, and what the device refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lowmem_ft.foundation.budget import Budget
from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.foundation.system.host_limits import tightest_host_limit
from lowmem_ft.models.hf_config import load_model_config, weights_dtype
from lowmem_ft.planning.estimator.device_target import CPU, choose_gpu, limits
from lowmem_ft.planning.estimator.estimate import estimate_memory
from lowmem_ft.planning.estimator.runtime import model_on_meta, virtual_runtime
from lowmem_ft.planning.estimator.traces.trace_cache import KeptTraces
from lowmem_ft.planning.estimator.worst_batch import row_length
from lowmem_ft.planning.planner.bounds import ModelShape, micro_batch_tokens, shape_of
from lowmem_ft.planning.planner.search.candidates import expected_bytes
from lowmem_ft.planning.planner.search.estimated_needs import Limits, Need, need_from
from lowmem_ft.planning.planner.search.most_layers import with_most_layers
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.reading.keys import keys_with
from lowmem_ft.recipe.rules.budget_limits import refuse_budget
from lowmem_ft.recipe.rules.rule import Rule, reads
from lowmem_ft.training.runtimes.build import plan_session
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.tracing_machine import TracingMachine

Answer = tuple[MemoryEstimate, int]

COMMON_EVENTS = 1500
"""Events per layer in a trace of common length, such as an 8B's; an estimate with more counts as several."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A device, what a plan may use of it and of the host, and the model.

    Args:
        gpu: the training device; None: this machine's processor.
        budget: the user's; on this machine, if it names no host memory, with what the host has available.
        limits: the bytes available.
        shape: the model's sizes, for bounds.
        rules: what the device refuses.
        kept: cached traces.
    """

    gpu: Gpu | None
    budget: Budget
    limits: Limits
    shape: ModelShape
    rules: tuple[Rule, ...]
    kept: KeptTraces

    @staticmethod
    def of(recipe: Recipe, name: str | Gpu | None) -> Target:
        """Return the target of a recipe and its budget.

        Args:
            recipe: what will be trained.
            name: GPU, as for :func:`lowmem_ft.estimate_memory`.

        Raises:
            UserError: if there is no such GPU, or a budget is not available.
            ModelError: if there is no such model.
        """
        gpu, _ = choose_gpu(name, recipe.budget, use_cpu=recipe.training.use_cpu)
        is_here = gpu is None or (name is None and torch.cuda.is_available())
        budget = recipe.budget
        per_machine = recipe.distributed.plan().per_machine
        refuse_budget(budget, gpu, is_here, per_machine)
        if budget.host is None and is_here:
            budget = dataclasses.replace(budget, host=f"{tightest_host_limit(None).available_bytes}B")
        verdict = limits(gpu, budget, per_machine)
        hf_config = load_model_config(recipe.model, architecture_only=True)
        model = model_on_meta(recipe.model, hf_config)
        shape = shape_of(model, row_length(recipe, hf_config), weights_dtype(recipe.model, hf_config))
        return Target(
            gpu=gpu,
            budget=budget,
            limits=Limits(
                device_bytes=_or_infinite(verdict.device_bytes), host_bytes=_or_infinite(verdict.host_bytes)
            ),
            shape=shape,
            rules=(
                _device_rule(gpu, hf_config),
                _rule_of_linear_layers(shape),
                _rule_of_experts(recipe, shape, gpu),
                _rule_of_chunks(recipe, shape),
            ),
            kept=KeptTraces.of_user(),
        )

    @property
    def has_bfloat16(self) -> bool:
        """True if the device computes with bfloat16."""
        return self.gpu is None or self.gpu.has_bfloat16

    def estimate(self, recipe: Recipe, other: Gpu | None = None) -> Answer:
        """Return an estimate of the recipe in full.

        Args:
            recipe: with the settings to try.
            other: a GPU to try it on in place of this device, with all of its memory.

        Returns:
            The same as :func:`_estimate_in_full`.
        """
        budget = self.budget if other is None else dataclasses.replace(self.budget, device=None)
        return _estimate_in_full(recipe, other or self.gpu, budget, self.kept)

    def need(self, recipe: Recipe, counted: Sequence[str] = (), kept: KeptTraces | None = None) -> Need:
        """Return what a recipe needs.

        Args:
            recipe: with the settings to try.
            counted: numbers of last layers, of which it takes as many as fit.
            kept: cached traces; None: the target's own.
        """

        def need_of(one: Recipe) -> Need:
            estimate, num_events = _estimate_in_full(one, self.gpu, self.budget, kept or self.kept)
            effort = num_events / COMMON_EVENTS / max(1, self.shape.num_layers)
            return need_from(estimate, effort, one)

        def expected(one: Recipe) -> float:
            return float(expected_bytes(one, self.shape, self.gpu)[0])

        return (
            with_most_layers(recipe, counted, self.limits, need_of, expected) if counted else need_of(recipe)
        )


def _estimate_in_full(recipe: Recipe, gpu: Gpu | None, budget: Budget, kept: KeptTraces) -> Answer:
    """Return an estimate without its allocations, as a search keeps forty of them and these would take too much memory.

    Args:
        recipe: with the settings to try.
        gpu: the device; None: this machine's processor.
        budget: the memory limits.
        kept: cached traces.

    Returns:
        The estimate, and its trace's number of events, which measures its effort independently of other load.
    """
    estimate = estimate_memory(recipe, gpu or CPU, budget=budget, kept=kept)
    return estimate.without_timeline(), len(estimate.timeline.events)


def _or_infinite(num_bytes: int | None) -> float:
    return float("inf") if num_bytes is None else float(num_bytes)


def _rule_of_linear_layers(shape: ModelShape) -> Rule:
    """Return the rule that activations are recomputed between linear layers, which experts of one tensor are not."""

    @reads("checkpointing.mlp_activation")
    def rule(recipe: Recipe) -> Iterator[str]:
        if recipe.checkpointing.mlp_activation != "keep" and not shape.activated:
            yield "checkpointing.mlp_activation=recompute needs MLPs of linear layers, and the model has none."

    return rule


def _rule_of_experts(asked: Recipe, shape: ModelShape, gpu: Gpu | None) -> Rule:
    """Return the rule that streamed layers are checkpointed if experts share a tensor, except the recipe's own."""

    @reads("offload.parameters", "checkpointing.mode", "checkpointing.skip_last_layers")
    def rule(recipe: Recipe) -> Iterator[str]:
        checkpointing, own = recipe.checkpointing, asked.checkpointing
        if gpu is None or not shape.tensor_of_experts or recipe.offload.parameters != "stream":
            return
        if checkpointing.mode == "none" or checkpointing.skip_last_layers not in (0, own.skip_last_layers):
            yield (
                f"offload.parameters=stream needs every layer checkpointed, as {shape.tensor_of_experts} holds the "
                "weights of several experts."
            )

    return rule


def _rule_of_chunks(asked: Recipe, shape: ModelShape) -> Rule:
    """Return the rule that a chunk is smaller than a micro-batch, unless it is the recipe's own."""

    @reads("loss.chunk_tokens", "training.per_device_train_batch_size", "data.max_length")
    def rule(recipe: Recipe) -> Iterator[str]:
        chunk, tokens = recipe.loss.chunk_tokens, micro_batch_tokens(recipe, shape)
        if chunk not in (None, asked.loss.chunk_tokens) and chunk >= tokens:
            yield f"loss.chunk_tokens={chunk} gains nothing with {tokens} tokens in a micro-batch."

    return rule


def _device_rule(gpu: Gpu | None, hf_config: Any) -> Rule:
    """Return what a run checks before it builds anything: types, optimizer and attention of the device."""

    @reads(
        *(
            "model",
            "adapter",
            "training.mixed_precision",
            "optimizer.name",
            "data.packing",
            "distributed.strategy",
        ),
        *keys_with("no loss scale"),
    )
    def rule(recipe: Recipe) -> Iterator[str]:
        machine = TracingMachine() if gpu is None else VirtualGPU(gpu)
        try:
            with machine:
                plan_session(recipe, virtual_runtime(machine, recipe.training), hf_config)
        except UserError as error:
            yield from error.problems

    return rule
