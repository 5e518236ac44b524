"""From a recipe and a budget to the settings with which a step is fastest inside it."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from lowmem_ft.budget import Budget, is_of_size
from lowmem_ft.catalog.gpu import Gpu
from lowmem_ft.catalog.gpus import load_gpus
from lowmem_ft.errors import UserError
from lowmem_ft.estimator.estimate import estimate_memory
from lowmem_ft.estimator.host import CUDA_PROCESS_BYTES, PROCESS_BYTES
from lowmem_ft.estimator.kept_traces import KeptTraces
from lowmem_ft.estimator.runtime import VirtualRuntime, model_on_meta
from lowmem_ft.estimator.target import choose_gpu, limits
from lowmem_ft.estimator.worst_batch import row_length
from lowmem_ft.memory.estimate import MemoryEstimate
from lowmem_ft.memory.host_limits import tightest_host_limit
from lowmem_ft.memory.timeline import Timeline
from lowmem_ft.models import load_model_config
from lowmem_ft.models.loading import weights_dtype
from lowmem_ft.planner.bounds import ModelShape, shape_of
from lowmem_ft.planner.candidates import candidates_of, prior_of, with_headroom
from lowmem_ft.planner.ctrl_c import CtrlC
from lowmem_ft.planner.explain import Findings, Neighbours, nearest
from lowmem_ft.planner.memory_plan import Counts, MemoryPlan
from lowmem_ft.planner.search import Limits, Need, Search
from lowmem_ft.planner.space import Rule, Space, consent_keys, space_of, words_of
from lowmem_ft.recipe import Recipe, check_recipe
from lowmem_ft.recipe.plan_config import Consent
from lowmem_ft.training.build import plan_session
from lowmem_ft.units import format_bytes, parse_bytes
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.machine import VirtualMachine

MAX_ESTIMATES = 28
"""Of a search: each takes a second or more. What is left by then is counted, and said."""

NEIGHBOUR_ESTIMATES = 12
"""For the neighbours of the best, which is what the explanation speaks of."""

CARDS_TRIED = 3
"""Of the catalogue, from the smallest that should do."""


@dataclass(frozen=True, kw_only=True)
class PlanProgress:
    """How far a plan is.

    Args:
        combinations: valid ones, among which it chooses.
        estimated: of these so far.
        best: the best so far; None if nothing fits yet.
    """

    combinations: int
    estimated: int
    best: MemoryEstimate | None


OnProgress = Callable[[PlanProgress], None]


def plan(
    recipe: Recipe,
    budget: Budget | None = None,
    gpu: str | Gpu | None = None,
    *,
    allow: Sequence[Consent] = (),
    keep: Sequence[str] = (),
    on_progress: OnProgress = lambda progress: None,
) -> MemoryPlan:
    """The memory knobs with which a step of a recipe is fastest inside a budget of device and host memory.

    The rows of a step stay, and so does the mathematics, up to unbiased rounding, unless ``allow`` names what may go:
    that is given up only where nothing else was found to fit. Each combination counts as it is estimated, at the upper
    end of its range, with headroom enough not to be tight, over load, steps, evaluation and saving.

    The same arguments give the same plan. A search that came to its end (``MemoryPlan.is_proven``) has found the
    fastest of all combinations, so that a larger budget is never slower; one that ran out of estimates says what it
    left.

    Args:
        recipe: where it starts; what its values say beside memory stays.
        budget: what may be used; None: the recipe's own.
        gpu: where, as for :func:`lowmem_ft.estimate_memory`.
        allow: what may be given up, the least missed first, beside the recipe's ``plan.allow``.
        keep: keys or groups that stay as they are, beside the recipe's ``plan.keep``.
        on_progress: called before each estimate.

    Returns:
        The plan; where nothing fits, the nearest, with what is missing. After Ctrl-C the best so far.

    Raises:
        RecipeError: if the recipe has conflicts, or a word or key does not exist.
        UserError: if a budget is no size or cannot be had, or no combination runs on the device.
        ModelError: if the model cannot be found or traced.
        KeyboardInterrupt: if the user ends it before anything was found.
    """
    start = time.perf_counter()
    recipe = _asked(recipe, budget, allow, keep)
    check_recipe(recipe)
    target = _Target.of(recipe, gpu)
    result: MemoryPlan | None = None
    for granted in range(len(recipe.plan.allow) + 1):
        tier = _tier(recipe, granted)
        space = _space(tier, target, must_use=recipe.plan.allow[granted - 1] if granted else None)
        if granted and not space.combinations:
            continue
        latest = _plan_in(space, target, on_progress)
        if result is None or latest.fits or _missing(latest) < _missing(result):
            result = latest
        if latest.fits or latest.interrupted:
            break
    assert result is not None, "the first tier raises where it has no combination"
    return dataclasses.replace(
        result,
        recipe=_trains_as_it_is(result.recipe, recipe),
        smallest_gpu=None if result.fits or result.interrupted else _smallest_gpu(result, target),
        seconds=time.perf_counter() - start,
    )


def planned(recipe: Recipe, on_progress: OnProgress = lambda progress: None) -> MemoryPlan:
    """The plan of a recipe by its own ``plan`` group: what has to happen before training where ``plan.mode`` is auto.

    For whoever starts a run: call it before the run's folder is opened, in the main process alone (the others take its
    recipe). It plans for this machine's GPU. Train ``MemoryPlan.recipe``, whose ``plan.mode`` is none; where
    ``MemoryPlan.fits`` is false, end with ``errors.EXIT_DOES_NOT_FIT``. A run that resumes trains the recipe of its
    checkpoint and is not planned again: formats of the state may not change. For no recipe at all,
    :func:`lowmem_ft.recipe.defaults.with_defaults_of_plan` adds to the settings what a model alone leaves open.

    Args:
        recipe: with ``plan.mode=auto``, or a budget to be planned for.
        on_progress: called before each estimate.

    Returns:
        The plan.

    Raises:
        UserError: as :func:`plan`.
    """
    return plan(recipe, on_progress=on_progress)


@dataclass(frozen=True, kw_only=True)
class _Target:
    """Where a plan is for, and what there is."""

    gpu: Gpu | None
    budget: Budget
    limits: Limits
    shape: ModelShape
    rules: tuple[Rule, ...]
    kept: KeptTraces

    @staticmethod
    def of(recipe: Recipe, name: str | Gpu | None) -> _Target:
        gpu, _ = choose_gpu(name, recipe.budget, use_cpu=recipe.training.use_cpu)
        is_here = name is None and (gpu is None or torch.cuda.is_available())
        budget = recipe.budget
        problems = [*_beyond_device(budget, gpu), *_beyond_host(budget, gpu, is_here=is_here)]
        if problems:
            raise UserError(*problems)
        if budget.host is None and is_here:
            budget = dataclasses.replace(budget, host=f"{tightest_host_limit(None).available_bytes}B")
        verdict = limits(gpu, budget)
        hf_config = load_model_config(recipe.model, architecture_only=True)
        model = model_on_meta(recipe.model, hf_config)
        shape = shape_of(model, row_length(recipe, hf_config), weights_dtype(recipe.model, hf_config))
        return _Target(
            gpu=gpu,
            budget=budget,
            limits=Limits(
                device_bytes=_or_infinite(verdict.device_bytes), host_bytes=_or_infinite(verdict.host_bytes)
            ),
            shape=shape,
            rules=(_device_rule(gpu, hf_config),),
            kept=KeptTraces.of_user(),
        )

    @property
    def has_bfloat16(self) -> bool:
        return self.gpu is None or self.gpu.has_bfloat16

    def estimate(self, recipe: Recipe) -> MemoryEstimate:
        """Of the recipe in full; without every allocation, of which forty estimates would hold too many."""
        estimate = estimate_memory(recipe, self.gpu or "cpu", budget=self.budget, kept=self.kept)
        return dataclasses.replace(estimate, timeline=Timeline())


def _asked(recipe: Recipe, budget: Budget | None, allow: Sequence[Consent], keep: Sequence[str]) -> Recipe:
    config = recipe.plan
    merged = dataclasses.replace(
        config,
        allow=tuple(dict.fromkeys((*config.allow, *allow))),
        keep=tuple(dict.fromkeys((*config.keep, *keep))),
    )
    return dataclasses.replace(recipe, plan=merged, budget=recipe.budget if budget is None else budget)


def _beyond_device(budget: Budget, gpu: Gpu | None) -> Sequence[str]:
    """A budget that the device cannot offer, or that its process alone exceeds."""
    if budget.device is None:
        return ()
    wanted = parse_bytes(budget.device)
    there = psutil.virtual_memory().total if gpu is None else gpu.memory_bytes
    name = "this machine" if gpu is None else gpu.name
    if not is_of_size(there, wanted):
        return (
            f"budget.device={budget.device} is more than {name} has, {format_bytes(there)}. Lower it, or name a larger "
            "GPU with --gpu.",
        )
    least = PROCESS_BYTES if gpu is None else gpu.context_bytes
    if wanted <= least:
        return (
            f"budget.device={budget.device} is less than the process takes on {name} before any tensor, "
            f"{format_bytes(least)}. Raise it.",
        )
    return ()


def _beyond_host(budget: Budget, gpu: Gpu | None, *, is_here: bool) -> Sequence[str]:
    if budget.host is None:
        return ()
    wanted, there = parse_bytes(budget.host), psutil.virtual_memory().total
    least = PROCESS_BYTES + (0 if gpu is None else CUDA_PROCESS_BYTES)
    if wanted <= least:
        return (
            f"budget.host={budget.host} is less than the process itself takes, {format_bytes(least)} with its "
            "libraries and before any tensor. Raise it.",
        )
    if is_here and wanted > there:
        return (f"budget.host={budget.host} is more than this machine has, {format_bytes(there)}. Lower it.",)
    return ()


def _or_infinite(num_bytes: int | None) -> float:
    return float("inf") if num_bytes is None else float(num_bytes)


def _device_rule(gpu: Gpu | None, hf_config: Any) -> Rule:
    """What a run checks before it builds anything: types, optimizer and attention of the device."""

    def problems(recipe: Recipe) -> Sequence[str]:
        machine = VirtualMachine() if gpu is None else VirtualGPU(gpu)
        try:
            with machine:
                plan_session(recipe, VirtualRuntime(machine, recipe.training), hf_config)
        except UserError as error:
            return error.problems
        return ()

    keys = (
        "model",
        "adapter",
        "training.mixed_precision",
        "offload.parameters",
        "optimizer.name",
        "data.packing",
    )
    return Rule(keys=keys, problems=problems)


def _tier(recipe: Recipe, granted: int) -> Recipe:
    """The recipe with the first so many words of its ``plan.allow``."""
    return dataclasses.replace(
        recipe, plan=dataclasses.replace(recipe.plan, allow=recipe.plan.allow[:granted])
    )


def _space(recipe: Recipe, target: _Target, *, must_use: str | None) -> Space:
    """The combinations of one tier: those that use its last word, as the others have been searched before.

    Raises:
        UserError: if there is none in the first tier.
    """

    def unused(changed: Recipe) -> Sequence[str]:
        return () if must_use in words_of(recipe, changed) else ("searched with less given up",)

    rules = list(target.rules)
    if must_use is not None:
        rules.append(Rule(keys=consent_keys(), problems=unused))
    space = space_of(
        recipe, num_layers=target.shape.num_layers, has_bfloat16=target.has_bfloat16, rules=rules
    )
    if not space.combinations and must_use is None:
        reasons = sorted(space.refused, key=lambda reason: -space.refused[reason])
        raise UserError("No combination of the memory knobs can be trained there.", *reasons[:3])
    return space


def _plan_in(space: Space, target: _Target, on_progress: OnProgress) -> MemoryPlan:
    """The best of a space, explained; Ctrl-C ends the search."""
    with CtrlC() as ctrl_c:
        return _searched(space, target, on_progress, ctrl_c)


def _searched(space: Space, target: _Target, on_progress: OnProgress, ctrl_c: CtrlC) -> MemoryPlan:
    """The best of a space, explained."""
    candidates = candidates_of(space, target.shape, target.gpu)

    def need_of(place: int) -> Need | str:
        ctrl_c.check()
        best = search.found.best
        on_progress(
            PlanProgress(
                combinations=len(candidates),
                estimated=len(search.found.needs),
                best=None if best is None else search.found.needs[best].estimate,
            )
        )
        try:
            return _need(target.estimate(space.recipe_of(space.combinations[place])))
        except UserError as error:
            return " ".join(error.problems)

    search = Search(candidates, target.limits, need_of, prior_of(space), max_estimates=MAX_ESTIMATES)
    own = {combination: place for place, combination in enumerate(space.combinations)}.get(space.own)
    found = search.run(own)
    neighbours = Neighbours(space, search)
    if not found.interrupted:
        try:
            neighbours.improve(NEIGHBOUR_ESTIMATES)
        except KeyboardInterrupt:
            found.interrupted = True
    if not found.needs:
        _estimate_nearest(search, candidates, target.limits)
    findings = Findings(space=space, candidates=candidates, limits=target.limits, found=search.conclude())
    return _explained(findings, neighbours)


def _need(estimate: MemoryEstimate) -> Need:
    peak = with_headroom(estimate.process_peak_bytes)
    return Need(
        seconds=0.0 if estimate.step is None else estimate.step.seconds,
        device_bytes=max(peak, estimate.process_high_bytes),
        host_bytes=with_headroom(estimate.host_peak_bytes),
        fits=estimate.fits and not estimate.tight,
        estimate=estimate,
    )


def _estimate_nearest(search: Search, candidates: Any, target_limits: Limits) -> None:
    """Where bounds alone say that nothing fits: what the combination needs whose bounds miss least.

    Raises:
        UserError: if none of the nearest can be built.
        KeyboardInterrupt: if the user had ended the search before.
    """
    if search.found.interrupted:
        raise KeyboardInterrupt
    missing = [
        sum(target_limits.missing(float(device), float(host)))
        for device, host in zip(candidates.device_bytes_N, candidates.host_bytes_N, strict=True)
    ]
    order = sorted(range(len(missing)), key=lambda place: (missing[place], int(candidates.after_N[place])))
    answer: Need | str = ""
    for place in order[:CARDS_TRIED]:
        answer = search.estimate(place)
        if isinstance(answer, Need):
            return
    raise UserError(str(answer))


def _explained(findings: Findings, neighbours: Neighbours) -> MemoryPlan:
    found, space = findings.found, findings.space
    best = found.best if found.best is not None else nearest(list(found.needs.items()), findings.limits)
    assert best is not None, "something has been estimated"
    need = found.needs[best]
    over_device, over_host = findings.limits.missing(need.device_bytes, need.host_bytes)
    return MemoryPlan(
        recipe=space.recipe_of(space.combinations[best]),
        estimate=need.estimate,
        fits=need.fits,
        overrides=findings.changes(best),
        alternatives=findings.alternatives(),
        rejected=findings.rejected(),
        knobs=neighbours.knobs(findings) if need.fits else (),
        purchases=findings.purchases(),
        binds=findings.binds(),
        counts=Counts(
            estimated=len(found.needs),
            refused=sum(space.refused.values()) + len(found.refused),
            beyond_bytes=found.beyond_bytes,
            beyond_seconds=found.beyond_seconds,
            left=found.left,
        ),
        left_seconds=found.left_seconds,
        interrupted=found.interrupted,
        missing_device_bytes=round(over_device),
        missing_host_bytes=round(over_host),
        given_up=tuple(
            word
            for word in space.recipe.plan.allow
            if word in words_of(space.recipe, space.recipe_of(space.combinations[best]))
        ),
    )


def _missing(result: MemoryPlan) -> int:
    return result.missing_device_bytes + result.missing_host_bytes


def _trains_as_it_is(chosen: Recipe, asked: Recipe) -> Recipe:
    return dataclasses.replace(chosen, plan=dataclasses.replace(asked.plan, mode="none"))


def _smallest_gpu(result: MemoryPlan, target: _Target) -> str | None:
    """The smallest card on which the nearest plan fits, estimated there; none helps where the host lacks memory."""
    if target.gpu is None or result.missing_host_bytes:
        return None
    needed = target.limits.device_bytes + result.missing_device_bytes
    budget = dataclasses.replace(target.budget, device=None)
    cards = [
        gpu
        for gpu in load_gpus().values()
        if gpu.available_bytes >= needed and gpu.has_bfloat16 == target.gpu.has_bfloat16
    ]
    for gpu in cards[:CARDS_TRIED]:
        with contextlib.suppress(UserError):
            estimate = estimate_memory(result.recipe, gpu, budget=budget, kept=target.kept)
            if estimate.fits and not estimate.tight:
                return gpu.name
    return None
