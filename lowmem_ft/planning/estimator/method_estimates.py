"""Estimates for a model without a recipe: fine-tuning in full, with LoRA and with QLoRA, by shipped recipes.

A setting is traced twice: for all GPUs with bfloat16, and for those without. Tracing each of nine architectures would
take minutes. The timed step is that of the printed command, with all of its micro-batches: timing one of 16 was 15%
off.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.models.hf_config import load_model_config, max_positions
from lowmem_ft.planning.estimator.estimate import CannotRun
from lowmem_ft.planning.estimator.gpu_counts import room_bytes
from lowmem_ft.planning.estimator.methods.places import Asked, Places, Size
from lowmem_ft.planning.estimator.methods.routes import Route, routes_of
from lowmem_ft.planning.estimator.methods.settings_ladder import CANNOT_RUN, SettingsLadder, rank_of
from lowmem_ft.planning.estimator.runtime import model_on_meta
from lowmem_ft.planning.estimator.traces.trace_cache import KeptTraces
from lowmem_ft.recipe import Recipe, load_recipe
from lowmem_ft.recipe.gpu_count import ONE_GPU, Placement, placements
from lowmem_ft.recipe.shipped.fine_tuning_methods import (
    Method,
    methods_with,
    model_settings_only,
    recipe_of,
    values_by_key,
)
from lowmem_ft.techniques.kernels.fused_operators import has_fused_operators


@dataclass(frozen=True, kw_only=True)
class MethodEstimate:
    """The memory and time that one method needs on one GPU, or on each of several that train together.

    Args:
        method: the method.
        gpu: the GPU.
        placement: how many of it train together, and what their processes share.
        command: the settings that train it so, without the data: ``recipe=NAME model=MODEL`` and what differs.
        row_tokens: the most tokens of a row; None: not known.
        estimate: what the method needs; None if the GPU or the model cannot do it.
        problems: why it cannot be done; empty if it can.
    """

    method: Method
    gpu: Gpu
    command: tuple[str, ...]
    row_tokens: int | None = None
    estimate: MemoryEstimate | None = None
    problems: tuple[str, ...] = ()
    placement: Placement = ONE_GPU

    @property
    def title(self) -> str:
        """The method and the engine of its processes, for people."""
        engine = self.placement.engine
        return self.method.title if engine is None else f"{self.method.title}, {engine}"

    @property
    def recipe(self) -> Recipe:
        """The command's recipe, with ``distributed`` as at launch."""
        return self.placement.of(recipe_of(self.command), self.gpu.name)

    @property
    def devices(self) -> str:
        """The GPUs as ``--gpu`` takes them."""
        return self.placement.word(self.gpu.name)

    @property
    def fits(self) -> bool:
        """True if the GPU can do it, and it fits."""
        return self.estimate is not None and self.estimate.fits

    @property
    def rung(self) -> str:
        """The shipped recipe that does it."""
        return self.command[0].removeprefix("recipe=")


def estimate_methods(
    model: str,
    gpus: Sequence[Gpu],
    *,
    settings: Sequence[str] = (),
    count: int = 1,
    is_thorough: bool = True,
    kept: KeptTraces | None = None,
    on_start: Callable[[str], None] = lambda doing: None,
) -> list[MethodEstimate]:
    """Estimate what a model needs on each GPU by each method: one optimizer step of rows of up to 2048 tokens.

    For each GPU, the method's fastest settings that fit there are chosen, of a few: shipped recipes, rows of a
    micro-batch, layers that keep their activations, and fused kernels where the package is installed and knows the
    model. A step has as many rows with all of them, and what is timed is the command's own step. GPUs with bfloat16
    share a trace of the same settings, and so do those without, each with its own workspaces. Their attention kernels
    differ: these took the same memory when compared, and the same time within 1%. Settings are tried where their
    weights have room, from the GPU with the most room down. Each GPU gets the same answer as when it is estimated
    alone.

    Several GPUs share the rows of a step, by each engine that the settings leave open.

    Args:
        model: as in ``model=``.
        gpus: at least one.
        settings: further ``key=value`` settings; they choose the methods, see :func:`methods_with`.
        count: how many of each GPU train together.
        is_thorough: whether to trace full fine-tuning with streamed float32 weights too, where there is no bfloat16; if
            not, the result says that such GPUs cannot do it.
        kept: traces made before, as for ``estimate_memory``.
        on_start: called before a recipe is traced, with a description of it.

    Returns:
        For each method, in it for each engine, and in that for each GPU in their order, what it needs.

    Raises:
        RecipeError: if the settings are wrong.
        ModelError: if there is no such model.
    """
    own = (f"model={model}", *settings)
    config = load_recipe(None, model_settings_only(own)).model
    hf_config = load_model_config(config, architecture_only=True)
    on_meta = model_on_meta(config, hf_config)
    asked = Asked(
        own=own,
        size=Size.of(on_meta, max_positions(hf_config)),
        has_fused_kernels=has_fused_operators(on_meta),
        kept=kept or KeptTraces(),
        on_start=on_start,
    )
    strategy = values_by_key(own).get("distributed.strategy")
    results: list[MethodEstimate] = []
    for method, placement in itertools.product(methods_with(own), placements(count, strategy)):
        found: dict[str, MethodEstimate] = {}
        for has_bfloat16 in (True, False):
            alike = [gpu for gpu in gpus if gpu.has_bfloat16 == has_bfloat16]
            found |= _Search(asked, method, placement, is_thorough).fastest_that_fit(
                routes_of(method, placement, has_bfloat16=has_bfloat16), alike
            )
        results += [found[gpu.name] for gpu in gpus]
    return results


NOT_TRIED_IN_FLOAT32 = (
    "without bfloat16 its float32 weights wait on the host, at a fraction of the speed. Name the GPU, such as --gpu "
    "t4, to see its estimate."
)


@dataclass(frozen=True)
class _Search:
    """The search for the settings of one method on GPUs that share traces.

    Args:
        asked: the model.
        method: the method.
        placement: the GPUs of a run.
        is_thorough: see :func:`estimate_methods`.
    """

    asked: Asked
    method: Method
    placement: Placement
    is_thorough: bool

    def fastest_that_fit(
        self, routes: Sequence[tuple[Route, ...]], gpus: Sequence[Gpu]
    ) -> dict[str, MethodEstimate]:
        """Return for each GPU, by its name, the first route that fits with room to spare; else the best of all."""
        found: dict[str, MethodEstimate] = {}
        for together in routes:
            waiting = [gpu for gpu in gpus if _rank(found.get(gpu.name)) > 0]
            for route in together if waiting else ():
                if route.float32 == "on the host" and not self.is_thorough:
                    tried = self._refused(route.settings, waiting, (NOT_TRIED_IN_FLOAT32,))
                else:
                    tried = self._tried(route, waiting, tries_all=together == routes[-1])
                for result in tried:
                    if _is_better(result, found.get(result.gpu.name)):
                        found[result.gpu.name] = result
        return found

    def _tried(self, route: Route, gpus: Sequence[Gpu], *, tries_all: bool) -> Iterator[MethodEstimate]:
        """Yield one route's estimates on the GPUs with room for its weights, most room first; the last route on all."""
        largest = max(gpus, key=lambda gpu: gpu.memory_bytes)
        try:
            places = Places(self.asked, self.method, route, self.placement, largest)
            recipe = places.recipe(places.first)
        except UserError as error:
            yield from self._refused(route.settings, gpus, error.problems)
            return
        rooms = {gpu.name: room_bytes(gpu, recipe, recipe.budget) for gpu in gpus}
        ladder = SettingsLadder(
            rows=places.rows,
            kept=places.kept,
            estimate=places.estimate,
            room_bytes=lambda gpu: rooms[gpu.name],
        )
        row_tokens = recipe.data.max_length or self.asked.size.max_positions
        for gpu in sorted(gpus, key=lambda gpu: rooms[gpu.name], reverse=True):
            if not tries_all and rooms[gpu.name] < self.asked.size.least_bytes(recipe):
                return
            if self.placement.plan.copies_weights and rooms[gpu.name] < self.asked.size.weight_bytes(recipe):
                yield from self._refused(
                    places.command(places.first),
                    [gpu],
                    (self._too_large_for_ddp(gpu, recipe, rooms[gpu.name]),),
                )
                continue
            found = ladder.fastest(gpu)
            command, answer = places.command(found.setting), found.answer
            if isinstance(answer, CannotRun):  # a technique does not support the model; others may
                yield from self._refused(command, [gpu], answer.problems)
                continue
            yield MethodEstimate(
                method=self.method,
                gpu=gpu,
                placement=self.placement,
                command=command,
                row_tokens=row_tokens,
                estimate=answer,
            )

    def _too_large_for_ddp(self, gpu: Gpu, recipe: Recipe, room: int) -> str:
        weights = format_bytes(int(self.asked.size.weight_bytes(recipe)))
        return (
            f"Each process of ddp holds all weights, {weights}, which do not fit in the {format_bytes(room)} that "
            f"{gpu.name} has for tensors. distributed.strategy=fsdp2 shards them."
        )

    def _refused(
        self, command: tuple[str, ...], gpus: Sequence[Gpu], problems: tuple[str, ...]
    ) -> Iterator[MethodEstimate]:
        for gpu in gpus:
            yield MethodEstimate(
                method=self.method, gpu=gpu, placement=self.placement, command=command, problems=problems
            )


def best_of(results: Sequence[MethodEstimate]) -> MethodEstimate:
    """Return the fastest of results that fit; if none does, the one that is nearest to it.

    Args:
        results: at least one, of the same method and GPUs.
    """
    best = results[0]
    for result in results[1:]:
        if _is_better(result, best):
            best = result
    return best


def _rank(result: MethodEstimate | None) -> int:
    """Rank an answer for a GPU, best first: it fits, fits tightly, may fit, does not fit, cannot be done."""
    return CANNOT_RUN if result is None or result.estimate is None else rank_of(result.estimate)


def _is_better(result: MethodEstimate, before: MethodEstimate | None) -> bool:
    """Prefer, of two that fit, the faster one, and of two that do not, the later one, which takes less."""
    rank = _rank(result)
    if before is None or rank != _rank(before):
        return before is None or rank < _rank(before)
    if result.estimate is None or before.estimate is None or not result.fits:
        return True
    steps = [estimate.step for estimate in (result.estimate, before.estimate)]
    new, old = (0.0 if step is None else step.tokens_per_second for step in steps)
    return new > old
