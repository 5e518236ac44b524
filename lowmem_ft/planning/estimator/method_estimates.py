"""Estimates for a model without a recipe: fine-tuning in full, with LoRA and with QLoRA, by shipped recipes.

A setting is traced twice: for all GPUs with bfloat16, and for those without. Tracing each of nine architectures would
take minutes. The timed step is that of the printed command, with all of its micro-batches: timing one of 16 was 15%
off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedModel

from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.errors import ModelError, UserError
from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.models.hf_config import load_model_config, max_positions
from lowmem_ft.planning.estimator.estimate import CannotRun, SharedTraces
from lowmem_ft.planning.estimator.gpu_counts import room_bytes
from lowmem_ft.planning.estimator.methods.settings_ladder import (
    CANNOT_RUN,
    QUARTERS,
    Answer,
    Setting,
    SettingsLadder,
    rank_of,
)
from lowmem_ft.planning.estimator.runtime import model_on_meta
from lowmem_ft.planning.estimator.traces.repeated_layers import layer_counts
from lowmem_ft.planning.estimator.traces.trace_cache import KeptTraces
from lowmem_ft.recipe import Recipe, load_recipe
from lowmem_ft.recipe.gpu_count import on_gpus
from lowmem_ft.recipe.reading.another_model import layers_for
from lowmem_ft.recipe.reading.keys import key_with, recipe_keys
from lowmem_ft.recipe.shipped.fine_tuning_methods import (
    FUSED_KERNELS,
    ROWS,
    Method,
    for_as_many_rows,
    methods_with,
    model_settings_only,
    recipe_of,
    unless_typed,
    values_by_key,
)
from lowmem_ft.techniques.kernels.fused_operators import has_fused_operators
from lowmem_ft.techniques.modules.model_parts import decoder_layers

_NO_HELD_OUT_DATA = {"data.eval_split": "null", "training.eval_steps": "null"}
_CHECKPOINTING = "checkpointing."


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

    For each GPU, the method's fastest settings that fit there are chosen, of a few: shipped recipes, rows of a
    micro-batch, layers that keep their activations, and fused kernels where the package is installed and knows the
    model. A step has as many rows with all of them, and what is timed is the command's own step. GPUs with bfloat16
    share a trace of the same settings, and so do those without, each with its own workspaces. Their attention kernels
    differ: these took the same memory when compared, and the same time within 1%. Settings are tried where their
    weights have room, from the GPU with the most room down. Each GPU gets the same answer as when it is estimated
    alone.

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
    config = load_recipe(None, model_settings_only(own)).model
    hf_config = load_model_config(config, architecture_only=True)
    on_meta = model_on_meta(config, hf_config)
    asked = _Asked(
        own=own,
        size=_Size.of(on_meta, max_positions(hf_config)),
        has_fused_kernels=has_fused_operators(on_meta),
        kept=kept or KeptTraces(),
        on_start=on_start,
    )
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
    """A recipe and settings of it, for GPUs with or without bfloat16.

    Args:
        settings: the recipe and its settings.
        rows: rows of a micro-batch to choose from for each GPU, the fewest first; empty: the recipe's own.
        kept: quarters of the layers to choose from that keep their activations, the most first; likewise.
        float32: where its weights in float32 are.
    """

    settings: tuple[str, ...]
    rows: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    float32: Literal["", "on the device", "on the host"] = ""


def _routes(method: Method, *, has_bfloat16: bool) -> list[tuple[_Route, ...]]:
    """Return groups of routes in the order of preference; within a group the fastest that fits is chosen."""
    first, *others = (f"recipe={rung}" for rung in method.rungs)
    if has_bfloat16:
        roomy = _Route((first, *method.roomy), rows=method.rows, kept=method.kept)
        if not method.leaner:
            return [(roomy,)]
        as_shipped, leaner = _Route((first,)), _Route((first, *method.leaner), rows=method.leaner_rows)
        return [(as_shipped, roomy), (leaner,), *((_Route((other,)),) for other in others)]
    if method.resident_without_bfloat16 is None:
        return [(_Route((first, *method.without_bfloat16), rows=method.rows, kept=method.kept),)]
    last = (others[-1], *method.without_bfloat16)
    return [
        (_Route((f"recipe={method.resident_without_bfloat16}",), float32="on the device"),),
        (_Route(last, float32="on the host"),),
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
    has_fused_kernels: bool
    kept: KeptTraces
    on_start: Callable[[str], None]

    def fastest_that_fit(
        self,
        method: Method,
        routes: Sequence[tuple[_Route, ...]],
        gpus: Sequence[Gpu],
        *,
        is_thorough: bool,
    ) -> dict[str, MethodEstimate]:
        """Return for each GPU, by its name, the first route that fits with room to spare; else the best of all."""
        found: dict[str, MethodEstimate] = {}
        for together in routes:
            waiting = [gpu for gpu in gpus if _rank(found.get(gpu.name)) > 0]
            for route in together if waiting else ():
                if route.float32 == "on the host" and not is_thorough:
                    refused = (NOT_TRIED_IN_FLOAT32,)
                    tried: Iterator[MethodEstimate] = (
                        MethodEstimate(method=method, gpu=gpu, command=route.settings, problems=refused)
                        for gpu in waiting
                    )
                else:
                    tried = self._tried(method, route, waiting, tries_all=together == routes[-1])
                for result in tried:
                    if _is_better(result, found.get(result.gpu.name)):
                        found[result.gpu.name] = result
        return found

    def _tried(
        self, method: Method, route: _Route, gpus: Sequence[Gpu], *, tries_all: bool
    ) -> Iterator[MethodEstimate]:
        """Yield one route's estimates on the GPUs with room for its weights, most room first; the last route on all."""
        largest = max(gpus, key=lambda gpu: gpu.memory_bytes)
        places = _Places(self, method, route, largest)
        try:
            recipe = places.recipe(places.first)
        except UserError as error:
            yield from (
                MethodEstimate(method=method, gpu=gpu, command=route.settings, problems=error.problems)
                for gpu in gpus
            )
            return
        rooms = {gpu.name: room_bytes(gpu, recipe, recipe.budget) for gpu in gpus}
        ladder = SettingsLadder(
            rows=places.rows,
            kept=places.kept,
            estimate=places.estimate,
            room_bytes=lambda gpu: rooms[gpu.name],
        )
        row_tokens = recipe.data.max_length or self.size.max_positions
        for gpu in sorted(gpus, key=lambda gpu: rooms[gpu.name], reverse=True):
            if not tries_all and rooms[gpu.name] < self.size.least_bytes(recipe):
                return
            found = ladder.fastest(gpu)
            command, answer = places.command(found.setting), found.answer
            if isinstance(answer, CannotRun):  # a technique does not support the model; others may
                yield MethodEstimate(method=method, gpu=gpu, command=command, problems=answer.problems)
                continue
            yield MethodEstimate(
                method=method, gpu=gpu, command=command, row_tokens=row_tokens, estimate=answer
            )

    def command(self, settings: Sequence[str], chosen: Mapping[str, Any]) -> tuple[str, ...]:
        """Return settings for the model: rows that it takes, as many a step, and the recipe's share of last layers.

        Args:
            settings: a recipe and settings of it.
            chosen: further settings by key, which are for the model and not for the recipe's own.
        """
        name, *further = settings
        typed, limit = values_by_key(self.own), self.size.max_positions
        shipped = recipe_of(settings)
        counts, keys = dict(layer_counts(shipped, "last")), recipe_keys()
        of_choice = [
            f"{path}={value}"
            for path, value in chosen.items()
            if path in counts or keys[path].value_in(shipped) != value
        ]
        of_step = [f"{key}={value}" for key, value in for_as_many_rows(shipped, self.own).items()]
        of_route = [*unless_typed(unless_typed([*further, *of_choice], self.own), of_step), *of_step]
        length = shipped.data.max_length
        if limit is not None and length is not None and limit < length and "data.max_length" not in typed:
            of_route.append(f"data.max_length={limit}")
        for path, value in counts.items():
            own = layers_for(value, of_layers=_num_layers(shipped), num_layers=self.size.num_layers)
            if own != value and path not in typed and path not in chosen:
                of_route.append(f"{path}={own}")
        return (name, *self.own, *of_route)

    def traced(self, command: tuple[str, ...]) -> tuple[str, ...]:
        """Return the command without what changes no peak but lengthens a trace, unless the user typed it."""
        typed = values_by_key(self.own)
        if any(key.startswith("data.eval") or key == "training.eval_steps" for key in typed):
            return command
        return (*command, *(f"{key}={value}" for key, value in _NO_HELD_OUT_DATA.items() if key not in typed))


class _Places:
    """The places on the ladder of a route, as commands and estimates; a route that is not roomy has one.

    Args:
        asked: the model.
        method: the method.
        route: the route.
        traced_on: the GPU whose kernels all GPUs share.
    """

    def __init__(self, asked: _Asked, method: Method, route: _Route, traced_on: Gpu) -> None:
        self._asked, self._method, self._route, self._traced_on = asked, method, route, traced_on
        typed = values_by_key(asked.own)
        training = recipe_of(route.settings).training
        self._step_rows = training.per_device_train_batch_size * training.gradient_accumulation_steps
        are_rows_typed = any(key in typed for key in ROWS)
        are_layers_typed = any(key.startswith(_CHECKPOINTING) for key in typed)
        self.rows: tuple[int | None, ...] = (None,)
        self.kept: tuple[int | None, ...] = (None,)
        if route.rows and not are_rows_typed:
            self.rows = tuple(rows for rows in route.rows if self._step_rows % rows == 0)
        if route.kept and not are_layers_typed:
            self.kept = tuple(kept for kept in route.kept if kept in (0, QUARTERS) or self._num_kept(kept))
        self._fused = FUSED_KERNELS if asked.has_fused_kernels and traced_on.has_bfloat16 else {}
        self._shared: dict[Setting, SharedTraces] = {}

    @property
    def first(self) -> Setting:
        """The place with the fewest rows and the most kept activations."""
        return Setting(self.rows[0], self.kept[0])

    def command(self, setting: Setting) -> tuple[str, ...]:
        """Return the command of a place."""
        chosen: dict[str, Any] = {**self._fused}
        if setting.rows is not None:
            chosen |= {ROWS[0]: setting.rows, ROWS[1]: self._step_rows // setting.rows}
        if setting.kept is not None:
            keeps_all = setting.kept == QUARTERS
            chosen[f"{_CHECKPOINTING}mode"] = "none" if keeps_all else "full"
            chosen[f"{_CHECKPOINTING}skip_last_layers"] = 0 if keeps_all else self._num_kept(setting.kept)
            if keeps_all:
                chosen[f"{_CHECKPOINTING}mlp_activation"] = "keep"
        return self._asked.command(self._route.settings, chosen)

    def recipe(self, setting: Setting) -> Recipe:
        """Return what is traced of a place.

        Raises:
            UserError: if the user's settings break a rule in it.
        """
        return on_gpus(recipe_of(self._asked.traced(self.command(setting))), None)[0]

    def estimate(self, setting: Setting, gpu: Gpu) -> Answer:
        """Return what a place takes on a GPU."""
        if setting not in self._shared:
            rung = self._route.settings[0].removeprefix("recipe=")
            kind = "with" if gpu.has_bfloat16 else "without"
            self._asked.on_start(
                f"{self._method.title} by {rung}{_in_words(setting)} on GPUs {kind} bfloat16"
            )
            try:
                recipe = self.recipe(setting)
            except UserError as error:
                return CannotRun(gpu=gpu, problems=error.problems)
            self._shared[setting] = SharedTraces(
                recipe,
                kind=lambda gpu: gpu.has_bfloat16,
                kept=self._asked.kept,
                traced_on=self._traced_on,
            )
        return self._shared[setting].estimate(gpu)

    def _num_kept(self, quarters: int) -> int:
        return self._asked.size.num_layers * quarters // QUARTERS


def _in_words(setting: Setting) -> str:
    rows = "" if setting.rows is None else f", {setting.rows} row{'s' * (setting.rows > 1)}"
    if setting.kept is None:
        return rows
    kept = {0: "no activations kept", QUARTERS: "all activations kept"}
    return f"{rows}, {kept.get(setting.kept, f'{setting.kept}/{QUARTERS} of activations kept')}"


def _num_layers(recipe: Recipe) -> int:
    return load_model_config(recipe.model, architecture_only=True).get_text_config().num_hidden_layers


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
