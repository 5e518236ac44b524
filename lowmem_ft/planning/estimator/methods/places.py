"""Places of a route: its settings for a model, as commands, recipes and estimates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.errors import ModelError, UserError
from lowmem_ft.models.hf_config import load_model_config
from lowmem_ft.planning.estimator.estimate import CannotRun, SharedTraces
from lowmem_ft.planning.estimator.methods.routes import Route
from lowmem_ft.planning.estimator.methods.settings_ladder import QUARTERS, Answer, Setting
from lowmem_ft.planning.estimator.traces.repeated_layers import layer_counts
from lowmem_ft.planning.estimator.traces.trace_cache import KeptTraces
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.gpu_count import Placement, dealt_rows
from lowmem_ft.recipe.reading.another_model import layers_for
from lowmem_ft.recipe.reading.keys import key_with, recipe_keys
from lowmem_ft.recipe.shipped.fine_tuning_methods import (
    FUSED_KERNELS,
    ROWS,
    Method,
    for_as_many_rows,
    recipe_of,
    unless_typed,
    values_by_key,
)
from lowmem_ft.techniques.modules.model_parts import decoder_layers

_NO_HELD_OUT_DATA = {"data.eval_split": "null", "training.eval_steps": "null"}
_CHECKPOINTING = "checkpointing."


@dataclass(frozen=True, kw_only=True)
class Size:
    """The sizes that decide before a trace whether a recipe can fit, and how its settings fit the model."""

    parameters: int
    layer_parameters: int
    num_layers: int
    max_positions: int | None

    @classmethod
    def of(cls, model: PreTrainedModel, limit: int | None) -> Size:
        """Return the sizes of a model on the meta device, which takes at most so many positions."""
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

    def weight_bytes(self, recipe: Recipe) -> float:
        """Return the bytes that a whole copy of the weights takes at least."""
        itemsize = 4 if recipe.model.dtype == "float32" else 2
        in_layers = {"none": itemsize, "int8": 1.0}.get(recipe.model.quantization, 0.5)
        return in_layers * self.layer_parameters + itemsize * (self.parameters - self.layer_parameters)

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


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A model with settings, and what is the same for all methods."""

    own: tuple[str, ...]
    size: Size
    has_fused_kernels: bool
    kept: KeptTraces
    on_start: Callable[[str], None]

    def command(self, settings: Sequence[str], chosen: Mapping[str, Any], count: int = 1) -> tuple[str, ...]:
        """Return settings for the model: rows that it takes, as many a step, and the recipe's share of last layers.

        Args:
            settings: a recipe and settings of it.
            chosen: further settings by key, which are for the model and not for the recipe's own.
            count: number of GPUs that share the rows of a step.
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
        of_rows = {} if ROWS[0] in chosen else for_as_many_rows(shipped, self.own, count)
        of_step = [f"{key}={value}" for key, value in of_rows.items()]
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


class Places:
    """The places on the ladder of a route, as commands and estimates; a route that is not roomy has one.

    Args:
        asked: the model.
        method: the method.
        route: the route.
        placement: the GPUs that train it together.
        traced_on: the GPU whose kernels all GPUs share.
    """

    def __init__(
        self, asked: Asked, method: Method, route: Route, placement: Placement, traced_on: Gpu
    ) -> None:
        self._asked, self._method, self._route, self._traced_on = asked, method, route, traced_on
        self._placement = placement
        typed = values_by_key(asked.own)
        training = recipe_of(route.settings).training
        rows = training.per_device_train_batch_size, training.gradient_accumulation_steps
        self._step_rows = math.prod(dealt_rows(*rows, placement.count))
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
        return self._asked.command(self._route.settings, chosen, self._placement.count)

    def recipe(self, setting: Setting) -> Recipe:
        """Return what is traced of a place.

        Raises:
            UserError: if the user's settings break a rule in it.
        """
        return self._placement.of(recipe_of(self._asked.traced(self.command(setting))), self._traced_on.name)

    def estimate(self, setting: Setting, gpu: Gpu) -> Answer:
        """Return what a place takes on a GPU."""
        if setting not in self._shared:
            rung = self._route.settings[0].removeprefix("recipe=")
            kind = "with" if gpu.has_bfloat16 else "without"
            self._asked.on_start(
                f"{self._method.title} by {rung}{_in_words(setting)}{self._placement.in_words} on GPUs {kind} bfloat16"
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
