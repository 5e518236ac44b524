"""Estimates for a model without a recipe: fine-tuning in full, with LoRA and with QLoRA, by shipped recipes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedModel

from lowmem_ft.catalog.gpu_spec import Gpu
from lowmem_ft.estimator.estimate import CannotRun, SharedTraces
from lowmem_ft.estimator.gpu_counts import room_bytes
from lowmem_ft.estimator.runtime import model_on_meta
from lowmem_ft.estimator.traces.repeated_layers import layer_counts
from lowmem_ft.estimator.traces.trace_cache import KeptTraces
from lowmem_ft.foundation.errors import ModelError, UserError
from lowmem_ft.memory.memory_estimate import MemoryEstimate
from lowmem_ft.models.hf_config import load_model_config, max_positions
from lowmem_ft.recipe import Recipe, load_recipe
from lowmem_ft.recipe.gpu_count import on_gpus
from lowmem_ft.recipe.reading.another_model import layers_for
from lowmem_ft.recipe.reading.keys import key_with
from lowmem_ft.recipe.shipped.fine_tuning_methods import (
    Method,
    for_as_many_rows,
    methods_with,
    of_model_alone,
    recipe_of,
    untyped,
    values_of,
)
from lowmem_ft.techniques.modules.decoder_layers import decoder_layers

_NO_HELD_OUT_DATA = {"data.eval_split": "null", "training.eval_steps": "null"}
_ONE_MICRO_BATCH = {"training.gradient_accumulation_steps": "1"}


@dataclass(frozen=True, kw_only=True)
class MethodEstimate:
    """The memory and time that one method needs on one GPU.

    Args:
        method: the method.
        gpu: the GPU.
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
    is_thorough: bool = True,
    kept: KeptTraces | None = None,
    on_start: Callable[[str], None] = lambda doing: None,
) -> list[MethodEstimate]:
    """Estimate what a model needs on each GPU by each method: one optimizer step of rows of up to 2048 tokens.

    For each GPU, the method's fastest recipe that fits there is chosen. GPUs with bfloat16 share one trace of a recipe,
    and so do those without, each with its own workspaces. Their attention kernels differ: these took the same memory
    when compared, and the same time within 1%. A recipe is tried where its weights have room, from the GPU with the
    most room down. Each GPU gets the same answer as when it is estimated alone.

    Args:
        model: as in ``model=``.
        gpus: at least one.
        settings: further ``key=value`` settings; they choose the methods, see :func:`methods_with`.
        is_thorough: whether to trace full fine-tuning with streamed float32 weights too, where there is no bfloat16; if
            not, the result says that such GPUs cannot do it.
        kept: traces made before, as for ``estimate_memory``.
        on_start: called before a recipe is traced, with a description of it.

    Returns:
        For each method, and in it for each GPU in their order, what it needs.

    Raises:
        RecipeError: if the settings are wrong.
        ModelError: if there is no such model.
    """
    own = (f"model={model}", *settings)
    config = load_recipe(None, of_model_alone(own)).model
    hf_config = load_model_config(config, architecture_only=True)
    size = _Size.of(model_on_meta(config, hf_config), max_positions(hf_config))
    asked = _Asked(own=own, size=size, kept=kept or KeptTraces(), on_start=on_start)
    results: list[MethodEstimate] = []
    for method in methods_with(own):
        found: dict[str, MethodEstimate] = {}
        for has_bfloat16 in (True, False):
            alike = [gpu for gpu in gpus if gpu.has_bfloat16 == has_bfloat16]
            routes = _routes(method, has_bfloat16=has_bfloat16)
            found |= asked.fastest_that_fit(method, routes, alike, is_thorough=is_thorough)
        results += [found[gpu.name] for gpu in gpus]
    return results


@dataclass(frozen=True, kw_only=True)
class _Size:
    """The sizes that decide before a trace whether a recipe can fit, and how its settings fit the model."""

    parameters: int
    layer_parameters: int
    num_layers: int
    max_positions: int | None

    @classmethod
    def of(cls, model: PreTrainedModel, limit: int | None) -> _Size:
        try:
            layers = list(decoder_layers(model))
        except ModelError:  # recipes that stream layers report it themselves
            layers = []
        in_layers = sum(weight.numel() for layer in layers for weight in layer.parameters())
        return cls(
            parameters=model.num_parameters(),
            layer_parameters=in_layers,
            num_layers=len(layers),
            max_positions=limit,
        )

    def least_bytes(self, recipe: Recipe) -> float:
        """Return the bytes of weights on the device and what goes with them; a trace is made only where these fit."""
        optimizer, on_host = recipe.optimizer, key_with(recipe, "weights on host")
        itemsize = 4 if recipe.model.dtype == "float32" else 2
        if recipe.adapter.name != "none" or recipe.distributed.num_processes not in (None, 1):
            return 0.0
        if on_host:
            group = on_host.path.partition(".")[0]
            staying = sum(num for path, num in layer_counts(recipe, "last") if path.startswith(f"{group}."))
            return itemsize * self.layer_parameters * staying / max(1, self.num_layers)
        each = float(itemsize)
        if not optimizer.in_backward and recipe.training.gradient_accumulation_steps > 1:
            each += itemsize
        if not key_with(recipe, "state on host") and optimizer.row.takes_formats:
            each += optimizer.bytes_with(itemsize)
        return each * self.parameters


@dataclass(frozen=True)
class _Route:
    """A recipe and settings of it, for GPUs with or without bfloat16."""

    settings: tuple[str, ...]
    float32: Literal["", "on the device", "on the host"] = ""


def _routes(method: Method, *, has_bfloat16: bool) -> list[_Route]:
    """Return the routes in the order in which they are tried."""
    first, *others = (f"recipe={rung}" for rung in method.rungs)
    if has_bfloat16:
        return [_Route((first,)), _Route((first, *method.leaner)), *(_Route((other,)) for other in others)]
    if method.resident_without_bfloat16 is None:
        in_float16 = (first, *method.without_bfloat16)
        return [_Route(in_float16), _Route((*in_float16, *method.leaner))]
    last = (others[-1], *method.without_bfloat16)
    return [
        _Route((f"recipe={method.resident_without_bfloat16}",), float32="on the device"),
        _Route(last, float32="on the host"),
    ]


NOT_TRIED_IN_FLOAT32 = (
    "without bfloat16 its float32 weights wait on the host, at a fraction of the speed. Name the GPU, such as --gpu "
    "t4, to see its estimate."
)


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """A model with settings, and what is the same for all methods."""

    own: tuple[str, ...]
    size: _Size
    kept: KeptTraces
    on_start: Callable[[str], None]

    def fastest_that_fit(
        self, method: Method, routes: Sequence[_Route], gpus: Sequence[Gpu], *, is_thorough: bool
    ) -> dict[str, MethodEstimate]:
        """Return for each GPU, by its name, the first route that fits with room to spare; else the best of all."""
        found: dict[str, MethodEstimate] = {}
        for route, is_last in zip(routes, [*[False] * (len(routes) - 1), True], strict=True):
            waiting = [gpu for gpu in gpus if _rank(found.get(gpu.name)) > 0]
            if not waiting:
                break
            if route.float32 == "on the host" and not is_thorough:
                refused = (NOT_TRIED_IN_FLOAT32,)
                tried: Iterator[MethodEstimate] = (
                    MethodEstimate(method=method, gpu=gpu, command=route.settings, problems=refused)
                    for gpu in waiting
                )
            else:
                tried = self._tried(method, route, waiting, tries_all=is_last)
            for result in tried:
                if _is_better(result, found.get(result.gpu.name)):
                    found[result.gpu.name] = result
        return found

    def _tried(
        self, method: Method, route: _Route, gpus: Sequence[Gpu], *, tries_all: bool
    ) -> Iterator[MethodEstimate]:
        """Yield one route's estimates on the GPUs with room for its weights, most room first; the last route on all."""
        try:
            command = self._command(route)
            recipe, _ = on_gpus(recipe_of(self._traced(method, command)), None)
        except UserError as error:
            yield from (self._refused(method, route.settings, gpu, error.problems) for gpu in gpus)
            return
        shared = SharedTraces(recipe, kind=lambda gpu: gpu.has_bfloat16, kept=self.kept)
        row_tokens, said = recipe.data.max_length or self.size.max_positions, False
        rooms = {gpu.name: room_bytes(gpu, recipe, recipe.budget) for gpu in gpus}
        for gpu in sorted(gpus, key=lambda gpu: rooms[gpu.name], reverse=True):
            if not tries_all and rooms[gpu.name] < self.size.least_bytes(recipe):
                return
            if not said:
                kind = "with" if gpu.has_bfloat16 else "without"
                self.on_start(
                    f"{method.title} by {command[0].removeprefix('recipe=')} on GPUs {kind} bfloat16"
                )
                said = True
            answer = shared.estimate(gpu)
            if isinstance(answer, CannotRun):  # a technique does not support the model; others may
                yield self._refused(method, command, gpu, answer.problems)
                continue
            yield MethodEstimate(
                method=method, gpu=gpu, command=command, row_tokens=row_tokens, estimate=answer
            )

    def _refused(
        self, method: Method, command: tuple[str, ...], gpu: Gpu, problems: tuple[str, ...]
    ) -> MethodEstimate:
        return MethodEstimate(method=method, gpu=gpu, command=command, problems=problems)

    def _command(self, route: _Route) -> tuple[str, ...]:
        """Return settings for the model: rows that it takes, as many a step, and the recipe's share of last layers."""
        name, *settings = route.settings
        typed, limit = values_of(self.own), self.size.max_positions
        shipped = recipe_of(route.settings)
        of_step = [f"{key}={value}" for key, value in for_as_many_rows(shipped, self.own).items()]
        of_route = [*untyped(untyped(settings, self.own), of_step), *of_step]
        length = shipped.data.max_length
        if limit is not None and length is not None and limit < length and "data.max_length" not in typed:
            of_route.append(f"data.max_length={limit}")
        for path, value in layer_counts(shipped, "last"):
            own = layers_for(value, of_layers=_num_layers(shipped), num_layers=self.size.num_layers)
            if own != value and path not in typed:
                of_route.append(f"{path}={own}")
        return (name, *self.own, *of_route)

    def _traced(self, method: Method, command: tuple[str, ...]) -> tuple[str, ...]:
        """Return the command without what changes no peak but lengthens a trace, unless the user typed it."""
        typed = values_of(self.own)
        less = {**_NO_HELD_OUT_DATA, **(_ONE_MICRO_BATCH if method.is_traced_in_pieces else {})}
        if any(key.startswith("data.eval") or key == "training.eval_steps" for key in typed):
            less = {key: value for key, value in less.items() if key not in _NO_HELD_OUT_DATA}
        return (*command, *(f"{key}={value}" for key, value in less.items() if key not in typed))


def _num_layers(recipe: Recipe) -> int:
    return load_model_config(recipe.model, architecture_only=True).get_text_config().num_hidden_layers


def _rank(result: MethodEstimate | None) -> int:
    """Rank an answer for a GPU, best first: it fits, fits tightly, may fit, does not fit, cannot be done."""
    if result is None or result.estimate is None:
        return 4
    if result.fits:
        return int(result.estimate.tight)
    return 2 if result.estimate.verdict == "may not fit" else 3


def _is_better(result: MethodEstimate, before: MethodEstimate | None) -> bool:
    """Prefer, of two that do not fit, the later one, which takes less."""
    rank = _rank(result)
    return before is None or rank < _rank(before) or (rank == _rank(before) and not result.fits)
