"""The search for the settings with which a step of a recipe is fastest inside a budget."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from lowmem_ft.foundation.budget import Budget
from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.planning.estimator.traces import tracing
from lowmem_ft.planning.planner.explain import explained
from lowmem_ft.planning.planner.further_gains import with_fused_kernels, with_packing
from lowmem_ft.planning.planner.memory_plan import Counts, MemoryPlan
from lowmem_ft.planning.planner.plan_target import Target
from lowmem_ft.planning.planner.rows_per_gpu import numbers_up_to, on_number
from lowmem_ft.planning.planner.search.candidates import Candidates, candidates_of, expected_bytes
from lowmem_ft.planning.planner.search.estimated_search import OnProgress, estimate_nearest, search_in
from lowmem_ft.planning.planner.search.neighbours import Neighbours
from lowmem_ft.planning.planner.search.prefetch import num_processes_ahead
from lowmem_ft.planning.planner.search.search_findings import Findings
from lowmem_ft.planning.planner.smallest_gpu import smallest_fitting_gpu
from lowmem_ft.recipe import Recipe, check_recipe
from lowmem_ft.recipe.named_recipe import RecipeLike, as_budget, as_recipe
from lowmem_ft.recipe.plan_config import Consent
from lowmem_ft.recipe.rules.rule import reads
from lowmem_ft.recipe.space.search_space import Space, consent_keys, space_of, words_of


@contextlib.contextmanager
def quiet_logs() -> Iterator[None]:
    """Silence logs about settings, as no one has chosen these forty recipes yet; keep the warning about long traces."""
    loggers = [logging.getLogger(name) for name in ("lowmem_ft", tracing.__name__)]
    before = [log.level for log in loggers]
    for log, level in zip(loggers, (logging.ERROR, logging.WARNING), strict=True):
        log.setLevel(level)
    try:
        yield
    finally:
        for log, level in zip(loggers, before, strict=True):
            log.setLevel(level)


@quiet_logs()
def plan(
    recipe: RecipeLike,
    budget: Budget | str | None = None,
    gpu: str | Gpu | None = None,
    *,
    allow: Sequence[Consent] = (),
    keep: Sequence[str] = (),
    max_gpus: int = 1,
    on_progress: OnProgress = lambda progress: None,
) -> MemoryPlan:
    """Return the memory knobs with which a recipe's step is fastest inside a budget of device and host memory.

    The rows of a step do not change, nor does the mathematics, up to unbiased rounding, unless ``allow`` names what may
    be given up: that happens only if nothing else was found to fit. Each combination is judged by its estimate, at the
    upper end of its range, with enough headroom not to be tight, over load, steps, evaluation and saving.

    The same arguments give the same plan. A search that ran to its end (``MemoryPlan.is_proven``) has found the best of
    all combinations, and is never slower than one in a smaller budget; one that ended earlier may be, by something that
    it reports as left (see ``planning/planner/search/search.py``).

    Args:
        recipe: the starting point, or its name or path; its values that do not concern memory do not change.
        budget: what may be used, or the device's part such as ``24GiB``; None: the recipe's own.
        gpu: the device, as for :func:`lowmem_ft.estimate_memory`.
        allow: what may be given up, the least missed first, in addition to the recipe's ``plan.allow``.
        keep: keys or groups that do not change, in addition to the recipe's ``plan.keep``.
        max_gpus: if one GPU is not enough, 2, 4 and up to as many as 8 share the rows of a step; the plan is for the
            fewest on which something was found to fit, before anything of ``allow`` is given up.
        on_progress: called before each estimate.

    Returns:
        The plan; if nothing fits, the nearest, with what is missing. After Ctrl-C the best so far.

    Raises:
        RecipeError: if the recipe has conflicts, or a word or key does not exist.
        UserError: if a budget is not a size or not available, no combination runs on the device, or several GPUs
            cannot share the recipe.
        ModelError: if the model cannot be found or traced.
        KeyboardInterrupt: if the user ends it before anything was found.
    """
    start = time.perf_counter()
    recipe = _asked(as_recipe(recipe), as_budget(budget), allow, keep)
    check_recipe(recipe)
    places = _places(recipe, gpu, numbers_up_to(max_gpus, recipe))
    tiers: list[MemoryPlan] = []
    is_interrupted, smallest_gpu, fused, packed = False, None, None, None
    try:
        for tier in _tiers(recipe, places, on_progress):
            tiers.append(tier)
        result = min(tiers, key=_missing)
        target = places[result.num_gpus]
        if result.fits and not tiers[-1].interrupted:
            fused, packed = with_fused_kernels(result, target), with_packing(result, target)
        elif not tiers[-1].interrupted:
            smallest_gpu = smallest_fitting_gpu(result, target)
    except KeyboardInterrupt:
        if not tiers:
            raise
        result, is_interrupted = min(tiers, key=_missing), True
    return dataclasses.replace(
        result,
        recipe=_trains_as_it_is(result.recipe, recipe),
        counts=_all_counts(tiers),
        too_few_gpus=tuple(number for number in places if number < result.num_gpus),
        left_seconds=min((tier.left_seconds for tier in tiers if tier.counts.left), default=0.0),
        interrupted=is_interrupted or tiers[-1].interrupted,
        smallest_gpu=smallest_gpu,
        fused_kernels=fused,
        packing=packed,
        seconds=time.perf_counter() - start,
    )


def _asked(recipe: Recipe, budget: Budget | None, allow: Sequence[Consent], keep: Sequence[str]) -> Recipe:
    for name, words in (("allow", allow), ("keep", keep)):
        if isinstance(words, str):
            raise UserError(f"{name} is a list, got {words!r}. Write {name}=[{words!r}].")
    config = recipe.plan
    merged = dataclasses.replace(
        config,
        allow=tuple(dict.fromkeys((*config.allow, *allow))),
        keep=tuple(dict.fromkeys((*config.keep, *keep))),
    )
    return dataclasses.replace(recipe, plan=merged, budget=recipe.budget if budget is None else budget)


def _places(recipe: Recipe, gpu: str | Gpu | None, numbers: Sequence[int]) -> dict[int, Target]:
    """Return the targets by number of GPUs; several GPUs only if their processes fit on a host at all."""
    places = {1: Target.of(recipe, gpu)}
    if places[1].gpu is None and len(numbers) > 1:
        raise UserError("max_gpus needs a GPU, and this plan is for a processor. Name one, such as rtx-4090.")
    for number in numbers[1:]:
        with contextlib.suppress(UserError):
            places[number] = Target.of(on_number(recipe, number), gpu)
    return places


def _tiers(recipe: Recipe, places: Mapping[int, Target], on_progress: OnProgress) -> Iterator[MemoryPlan]:
    """Yield the best plan without giving anything up, then with one more word of ``plan.allow`` each, until one fits.

    Each tier tries the fewest GPUs first: giving something up costs more than another GPU.
    """
    for granted in range(len(recipe.plan.allow) + 1):
        hopeless: list[tuple[float, int, Space, Candidates]] = []
        for number, target in places.items():
            tier = on_number(_tier(recipe, granted), number)
            must_use = recipe.plan.allow[granted - 1] if granted else None
            space = _space(tier, target, must_use=must_use, may_be_empty=granted > 0 or number > 1)
            if not space.combinations:
                continue
            candidates = candidates_of(space, target.shape, target.gpu)
            if len(places) > 1 and not candidates.may_fit(target.limits).any():
                missing = tier.distributed.plan().in_all(candidates.least_missing(target.limits))
                hopeless.append((missing, number, space, candidates))
                continue
            best = _plan_in(space, candidates, target, recipe, on_progress)
            yield dataclasses.replace(best, num_gpus=number)
            if best.fits or best.interrupted:
                return
        if hopeless:  # report what the nearest of them lacks
            _, number, space, candidates = min(hopeless, key=lambda row: row[:2])
            best = _plan_in(space, candidates, places[number], recipe, on_progress)
            yield dataclasses.replace(best, num_gpus=number)


def _tier(recipe: Recipe, granted: int) -> Recipe:
    """Return the recipe with this many words of its ``plan.allow``."""
    return dataclasses.replace(
        recipe, plan=dataclasses.replace(recipe.plan, allow=recipe.plan.allow[:granted])
    )


def _space(recipe: Recipe, target: Target, *, must_use: str | None, may_be_empty: bool) -> Space:
    """Return the combinations of one tier: those that use its last word, as the others have been searched before.

    Raises:
        UserError: if there is not one and ``may_be_empty`` is false.
    """

    @reads(*consent_keys())
    def unused(changed: Recipe) -> Iterator[str]:
        if must_use not in words_of(recipe, changed):
            yield "an earlier search gave up less"

    rules = list(target.rules)
    if must_use is not None:
        rules.append(unused)
    space = space_of(
        recipe, num_layers=target.shape.num_layers, has_bfloat16=target.has_bfloat16, rules=rules
    )
    if not space.combinations and not may_be_empty:
        # Not even the recipe as it is, whose own rules have been checked: the device's rules refuse it.
        reasons = [problem for rule in target.rules for problem in rule.problems(recipe)]
        if recipe.plan.keep:
            reasons.append(
                f"plan.keep holds {', '.join(recipe.plan.keep)}, which a plan must not change: without it there are "
                "more choices."
            )
        raise UserError("No combination of the memory settings can be trained there.", *reasons)
    return space


def _plan_in(
    space: Space, candidates: Candidates, target: Target, asked: Recipe, on_progress: OnProgress
) -> MemoryPlan:
    """Return the best of a search space, explained against the user's recipe; Ctrl-C ends the search."""
    with search_in(space, candidates, target, on_progress, num_processes_ahead()) as search:
        neighbours = Neighbours(space, search)
        found = search.run(neighbours.place_of(space.own))
        if not found.interrupted:
            try:
                neighbours.look_around()
            except KeyboardInterrupt:
                found.interrupted = True
        if not found.needs:
            estimate_nearest(
                search,
                candidates,
                target.limits,
                lambda place: expected_bytes(
                    space.recipe_of(space.combinations[place]), target.shape, target.gpu
                ),
            )
        return explained(Findings.of(search, space, target.limits, asked), neighbours)


def _missing(result: MemoryPlan) -> tuple[bool, int]:
    return not result.fits, result.missing_device_bytes + result.missing_host_bytes


def _all_counts(tiers: Sequence[MemoryPlan]) -> Counts:
    """Return the counts of all tiers on all numbers of GPUs together."""
    numbers = dict.fromkeys(tier.num_gpus for tier in tiers)
    each = [asdict(_counts([tier for tier in tiers if tier.num_gpus == number])) for number in numbers]
    return Counts(**{name: sum(counts[name] for counts in each) for name in each[0]})


def _counts(tiers: Sequence[MemoryPlan]) -> Counts:
    """Return the counts of all tiers on one number of GPUs.

    Each tier refuses again what the earlier ones refused, and also what they searched.
    """
    *before, last = [tier.counts for tier in tiers]
    searched = [counts.considered - counts.refused + counts.left for counts in before]
    all_counts = [*before, last]
    return Counts(
        estimated=sum(counts.estimated for counts in all_counts),
        refused=last.refused - sum(searched),
        beyond_bytes=sum(counts.beyond_bytes for counts in all_counts),
        beyond_seconds=sum(counts.beyond_seconds for counts in all_counts),
        left=sum(counts.left for counts in all_counts),
    )


def _trains_as_it_is(chosen: Recipe, asked: Recipe) -> Recipe:
    return dataclasses.replace(chosen, plan=dataclasses.replace(asked.plan, mode="none"))
