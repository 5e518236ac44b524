"""A question about a run: its recipe, its GPUs and its budget, with all that is wrong with them at once.

Commands, the page and Python make it of the same words. Nothing here imports torch, or traces a model.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from lowmem_ft.foundation.catalog.gpu_catalog import ALL_GPUS, CPU, find_gpu, gpu_word, split_count
from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.errors import UserError, raise_problems, raise_together
from lowmem_ft.recipe.checks.device_checks import check_device_of_estimate, check_device_of_run
from lowmem_ft.recipe.checks.path_checks import (
    check_model_files,
    check_packages,
    check_paths_of_data,
    check_paths_of_rehearsal,
    check_paths_of_run,
    check_sizes_of_model,
)
from lowmem_ft.recipe.command_lines import without
from lowmem_ft.recipe.gpu_count import on_gpus
from lowmem_ft.recipe.loading import load_recipe
from lowmem_ft.recipe.request.plan_defaults import named_as_planned, with_defaults_of_plan
from lowmem_ft.recipe.request.words import Purpose, gpu_problems, is_for_processor, split_words
from lowmem_ft.recipe.rules.budget_limits import (
    check_budget_of_plan,
    check_budget_of_run,
    refuse_budget_beyond_all,
)
from lowmem_ft.recipe.shipped.fine_tuning_methods import (
    LORA,
    check_methods,
    methods_with,
    model_settings_only,
    values_by_key,
)
from lowmem_ft.recipe.tree import Recipe

Check = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Request:
    """A question about a run.

    Args:
        purpose: the question, by the name of its command.
        recipe_name: the recipe's name or path; None: the settings name only a model.
        settings: the settings as typed.
        recipe: the recipe, with ``distributed`` as at launch.
        devices: the GPUs as ``--gpu`` takes them, ``all``, or ``cpu``; None: open.
    """

    purpose: Purpose
    recipe_name: str | None
    settings: tuple[str, ...]
    recipe: Recipe
    devices: str | None

    @classmethod
    def of(
        cls, purpose: Purpose, words: Sequence[str], gpu: str | None = None, problems: Iterable[str] = ()
    ) -> Request:
        """Parse a question. :meth:`check` then validates it against files, the catalogue and arithmetic.

        Args:
            purpose: the name of the command that answers it.
            words: ``recipe=NAME|PATH`` or ``model=NAME``, and ``key=value`` settings.
            gpu: GPUs as ``--gpu`` takes them, ``all``, or ``cpu``; None: open.
            problems: further problems, to be listed with those of the GPUs.

        Raises:
            RecipeError: if no recipe is named, or it breaks its rules.
            UserError: if there are no such GPUs.
        """
        name, settings = split_words(purpose, words)
        devices = None if gpu is None else gpu_word(gpu)
        raise_problems([*gpu_problems(purpose, devices), *problems])
        if name is None and purpose == "train":
            recipe = load_recipe(None, ["plan.mode=auto", *with_defaults_of_plan(settings)])
            if recipe.budget.device is not None:
                recipe = named_as_planned(recipe, settings, recipe.budget.device)
        elif name is None and purpose == "plan":
            recipe = load_recipe(None, with_defaults_of_plan(settings))
        elif name is None and not is_for_processor(settings, devices):
            recipe = load_recipe(None, model_settings_only(settings))
            recipe, _ = on_gpus(recipe, None if devices == ALL_GPUS else devices)
            return cls(purpose=purpose, recipe_name=name, settings=settings, recipe=recipe, devices=devices)
        else:
            recipe = load_recipe(name, settings)
        if purpose not in ("data", "train"):
            asked = None if devices in (ALL_GPUS, CPU) and purpose == "estimate" else devices
            recipe, _ = on_gpus(recipe, asked, is_planned=purpose == "plan")
        if devices == ALL_GPUS and recipe.checkpointing.mode == "auto":
            raise UserError(
                "checkpointing.mode=auto makes a choice for one GPU, got --gpu all. Name one, such as --gpu rtx-4090, "
                "or set checkpointing.mode=full."
            )
        return cls(purpose=purpose, recipe_name=name, settings=settings, recipe=recipe, devices=devices)

    @property
    def gpu(self) -> str | None:
        """The GPU's own name, ``all``, or ``cpu``; None: open."""
        return None if self.devices is None else split_count(self.devices)[1]

    @property
    def num_gpus(self) -> int:
        """The number of GPUs that train together."""
        return self.recipe.distributed.num_processes or 1

    @property
    def named_gpu(self) -> Gpu | None:
        """The GPU of the catalogue that was asked for by name; None: another device, or several."""
        return None if self.gpu in (None, ALL_GPUS, CPU) else find_gpu(self.gpu)

    @property
    def words(self) -> tuple[str, ...]:
        """The words of the question, without its GPUs."""
        return (*([] if self.recipe_name is None else [f"recipe={self.recipe_name}"]), *self.settings)

    @property
    def is_of_processor(self) -> bool:
        """True if the question is certainly about a CPU."""
        return self.gpu == CPU or (self.gpu is None and self.recipe.training.use_cpu)

    @functools.cached_property
    def is_by_method(self) -> bool:
        """True for an estimate of a model without a recipe, by each method that fits the settings."""
        is_of_model = self.purpose == "estimate" and self.recipe_name is None
        return is_of_model and not is_for_processor(self.settings, self.devices)

    def on_processor(self) -> Request:
        """Return the question as one about a recipe: on a CPU, there are no methods to compare."""
        return replace(self, recipe=load_recipe(None, self.settings))

    def check(self, *further: Check) -> None:
        """Refuse missing files, and settings that the device cannot run.

        Args:
            further: checks of the caller's own, to be listed before these.

        Raises:
            UserError: lists all problems.
        """
        raise_together(*further, *self._checks())

    def _checks(self) -> Iterator[Check]:
        recipe, gpu = self.recipe, self.named_gpu
        if self.purpose == "data":
            yield lambda: check_paths_of_data(recipe)
        elif self.purpose == "train":
            yield lambda: check_budget_of_run(recipe)
            yield lambda: check_paths_of_run(recipe)
            if recipe.plan.mode == "none":
                yield lambda: check_device_of_run(recipe)
        elif self.purpose == "rehearse":
            yield lambda: check_paths_of_rehearsal(recipe)
            yield lambda: refuse_budget_beyond_all(recipe) if gpu is None else self._check_device()
        else:
            if self.purpose == "plan":
                yield lambda: check_budget_of_plan(recipe, self.gpu)
            elif gpu is None:
                yield lambda: refuse_budget_beyond_all(recipe)
            yield lambda: check_model_files(recipe, architecture_only=True)
            yield lambda: check_packages(recipe)
            if self.is_by_method:
                yield self._check_methods
            else:
                yield lambda: check_sizes_of_model(recipe, is_planned=self.purpose == "plan")
                if self.purpose == "estimate":
                    yield self._check_device

    def _check_device(self) -> None:
        """Check what the catalogue says about a named device; only torch knows what this machine has."""
        if self.is_of_processor or self.named_gpu is not None:
            check_device_of_estimate(self.recipe, self.named_gpu)

    def _check_methods(self) -> None:
        """Refuse what needs a recipe, and settings that fit no method."""
        model = self.recipe.model.name_or_path
        if values_by_key(self.settings).get("checkpointing.mode") == "auto":
            raise UserError(
                f"checkpointing.mode=auto needs a recipe, got model={model} without one. Name one, such as "
                f"{self.with_recipe()}."
            )
        gpu = self.named_gpu

        def check(of_method: Recipe) -> None:
            check_sizes_of_model(of_method)
            if gpu is not None:
                check_device_of_estimate(of_method, gpu)

        # An engine refuses some of a method's settings, each in a row of its own.
        settings = without(self.settings, ("distributed.strategy",))
        check_methods(settings, check, has_bfloat16=gpu is None or gpu.has_bfloat16)

    def with_recipe(self) -> str:
        """Return words that name a recipe for the same model, one of the methods that the settings leave open."""
        methods = methods_with(self.settings)
        method = LORA if LORA in methods else methods[0]
        return shlex.join([f"recipe={method.rungs[0]}", f"model={self.recipe.model.name_or_path}"])
