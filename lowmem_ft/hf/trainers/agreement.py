"""A recipe and a trainer brought together: whose value of each shared setting a run uses, with the differences listed.

``shared_settings.py`` says who decides. A recipe sets what its file or its overrides write, and what is not at its
default; where it sets nothing, the trainer's value is used. The model is there already, so a recipe with another type,
quantization, attention or adapter that is not its default is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from lowmem_ft.data.config import DataConfig
from lowmem_ft.foundation.knob import as_typed
from lowmem_ft.hf.trainers.trainer_flags import asked_by_flag, liger_asked_by_flag
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.files.model_files import text_fields
from lowmem_ft.planning.script_recipes.script_model import quantization_of, weights_type
from lowmem_ft.recipe import Recipe, TrainingConfig
from lowmem_ft.recipe.plan_config import PlanConfig
from lowmem_ft.recipe.reading.keys import key_with, recipe_keys
from lowmem_ft.recipe.rules.conflicts import recipe_problems
from lowmem_ft.recipe.space.search_space import with_settings
from lowmem_ft.recipe.trainers.shared_settings import (
    HYPERPARAMETERS,
    SHARED_SETTINGS,
    Fields,
    SharedSetting,
    names_optimizer,
    overridden,
    plain,
)
from lowmem_ft.recipe.trainers.trainer_kinds import Kind, problems_of_kind, refused_defaults
from lowmem_ft.techniques.adapters.peft_layers import adapted_layers
from lowmem_ft.techniques.adapters.target_modules import ALL_LINEAR
from lowmem_ft.techniques.attention.grouped_attention import documented_name
from lowmem_ft.techniques.distributed.config import DistributedConfig
from lowmem_ft.techniques.modules.model_parts import base_model


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A setting for which recipe and trainer have different values.

    Args:
        key: the recipe's key.
        recipes: the recipe's value, as a user types it.
        trainers: the trainer's, in the recipe's terms or as arguments.
        used: whose value the run uses.
        is_override: whether a user gave the trainer's by name as the arguments were made from a recipe.
    """

    key: str
    recipes: str
    trainers: str
    used: Literal["recipe", "trainer"]
    is_override: bool = False

    def __str__(self) -> str:
        """Return the line of the listing."""
        both = [f"the recipe's {self.recipes}", f"the trainer's {self.trainers}"]
        used, unused = both if self.used == "recipe" else reversed(both)
        return f"{self.key}: {used}, not {unused}"


@dataclass
class Agreement:
    """The recipe that a trainer is to train with.

    Attributes:
        recipe: the recipe, with the trainer's values where the trainer decides or the recipe sets nothing.
        overridden: arguments that a user gave by name, over a recipe's.
        differences: the settings for which both have a value, and not the same.
        unread: settings of the recipe that neither the trainer nor ``hf.attach`` acts on, as a user types them.
        problems: what cannot work.
    """

    recipe: Recipe
    overridden: Collection[str] = ()
    differences: list[Difference] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def set(self, path: str, value: Any) -> None:
        """Change the recipe."""
        self.recipe = with_settings(self.recipe, {path: value})

    def take(self, row: SharedSetting, value: Any) -> None:
        """Take a trainer's value, unless the recipe sets another and decides; list the difference."""
        key = recipe_keys()[row.key]
        if key.value_in(self.recipe) == value:
            return
        if not key.is_set_in(self.recipe) or self.differ(row, as_typed(value)).used == "trainer":
            self.set(row.key, value)

    def differ(self, row: SharedSetting, trainers: str) -> Difference:
        """List a setting for which the trainer has another value than the recipe sets."""
        is_override = not row.fields(self.recipe).keys().isdisjoint(self.overridden)
        difference = Difference(
            key=row.key,
            recipes=as_typed(recipe_keys()[row.key].value_in(self.recipe)),
            trainers=trainers,
            used="trainer" if row.decides == "trainer" or is_override else "recipe",
            is_override=is_override,
        )
        self.differences.append(difference)
        return difference

    def follow_model(self, path: str, value: Any) -> None:
        """Take a value that the trainer's model was made with; add a problem if the recipe sets another."""
        key = recipe_keys()[path]
        own = key.value_in(self.recipe)
        if own not in (key.default, value):
            self.problems.append(
                f"{key.setting(own)} is decided as a model is made, and the trainer's has {as_typed(value)}. Pass "
                f"model=hf.prepare_model(name, recipe) to the trainer, or leave {path} out of the recipe."
            )
        self.set(path, value)


def agree(trainer: Any, recipe: Recipe, kind: Kind) -> Agreement:
    """Bring a recipe and a trainer together.

    Args:
        trainer: the trainer whose arguments, model and accelerator are read.
        recipe: the recipe to attach.
        kind: the kind of the trainer.

    Returns:
        The recipe to switch on, the differences, and all problems with it.
    """
    agreement = Agreement(recipe, overridden(trainer.args))
    agreement.problems += [
        f"{setting} leaves a choice to the planner, but an attached recipe must have all choices made. Plan first, "
        "with `lowmem-ft plan ... --write my.yaml`, and load that."
        for setting in recipe.undecided_keys
    ]
    _take_settings(agreement, trainer)
    _take_sharding(agreement, trainer.accelerator)
    _take_model(agreement, trainer.model)
    problems = [
        *asked_by_flag(agreement, trainer.args),
        *liger_asked_by_flag(agreement, trainer.args, kind),
    ]
    of_kind = list(problems_of_kind(agreement.recipe, kind))
    for row in refused_defaults(agreement.recipe, kind):
        agreement.set(row.key, row.off)
    training = agreement.recipe.training
    agreement.recipe = dataclasses.replace(
        agreement.recipe,
        data=DataConfig(),
        plan=PlanConfig(),
        training=TrainingConfig(**{name: getattr(training, name) for name in _TRAINED_WITH}),
    )
    agreement.problems += [*problems, *of_kind]
    # Refusals of a trainer have been reported; the rules would repeat them in other words.
    agreement.problems += [] if of_kind else recipe_problems(agreement.recipe)
    return agreement


_TRAINED_WITH = (
    "max_skipped_steps",
    *(row.key.removeprefix("training.") for row in SHARED_SETTINGS if row.in_step and "training." in row.key),
)
"""Keys of ``training`` that an attached step depends on."""

_ROWS, _STEPS = "training.per_device_train_batch_size", "training.gradient_accumulation_steps"

_NOT_ATTACHED = ("data.", "training.", "plan.", "distributed.", "budget.retry")
"""Keys that ``hf.attach`` does not act on by itself: a trainer's arguments carry them, or nothing does."""


def _take_settings(agreement: Agreement, trainer: Any) -> None:
    """Take the trainer's values or the recipe's, as the table says, and note what no argument carries."""
    recipe, args = agreement.recipe, trainer.args
    window = key_with(recipe, "whole window at once")
    carried = {"training.max_skipped_steps"}
    for row in SHARED_SETTINGS:
        fields = {name: value for name, value in row.fields(recipe).items() if hasattr(args, name)}
        if fields:
            carried.add(row.key)
        if row.decides == "technique" or (window and row.key == _ROWS):
            continue
        if window and row.key == _STEPS:
            _take_micro_batches(agreement, row, args, window.setting_in(recipe))
        elif row.key in HYPERPARAMETERS:
            _take_hyperparameter(agreement, row, trainer)
        elif row.in_step:
            agreement.take(row, row.value(trainer))
        else:
            _compare_arguments(agreement, row, fields, args)
    agreement.unread += [
        key.setting(key.value_in(recipe))
        for path, key in recipe_keys().items()
        if path.startswith(_NOT_ATTACHED) and path not in carried and key.value_in(recipe) != key.default
    ]


def _take_sharding(agreement: Agreement, accelerator: Any) -> None:
    """Take how the trainer's processes will share its model, if they do."""
    if not getattr(accelerator, "is_fsdp2", False):
        return
    own = agreement.recipe.distributed
    if own.strategy is not None and not own.plan().shards_rows:
        agreement.problems.append(
            f"distributed.strategy={own.strategy} is not how the trainer was launched, with FSDP 2. Leave it out: the "
            "launch decides."
        )
    agreement.recipe = dataclasses.replace(
        agreement.recipe,
        distributed=DistributedConfig(
            strategy="fsdp2",
            num_processes=accelerator.num_processes if accelerator.num_processes > 1 else None,
            reshard_after_forward=accelerator.state.fsdp_plugin.reshard_after_forward,
            sync_each_batch=own.sync_each_batch,
        ),
    )
    agreement.unread = [one for one in agreement.unread if not one.startswith("distributed.")]


def _compare_arguments(agreement: Agreement, row: SharedSetting, fields: Fields, args: Any) -> None:
    """List a difference in a setting that no step depends on; the trainer acts on its own value."""
    key = recipe_keys()[row.key]
    theirs = {name: getattr(args, name) for name in fields}
    other = [
        f"{name}={as_typed(getattr(value, 'value', value))}"
        for name, value in theirs.items()
        if plain(value) != plain(fields[name])
    ]
    if other and key.is_set_in(agreement.recipe):
        agreement.differ(row, ", ".join(other))


def _take_hyperparameter(agreement: Agreement, row: SharedSetting, trainer: Any) -> None:
    """Take a hyperparameter that is meant for the recipe's optimizer: those of Adam have defaults of their own."""
    args, optimizer = trainer.args, agreement.recipe.optimizer
    defaults = {spec.name: spec.default for spec in dataclasses.fields(args)}
    values = {name: getattr(args, name) for name in HYPERPARAMETERS[row.key]}
    is_default = all(value == defaults[name] for name, value in values.items())
    if row.key.removeprefix("optimizer.") in optimizer.row.hyperparameters:
        if names_optimizer(args, optimizer.name) or not is_default:
            agreement.take(row, row.value(trainer))
    elif not is_default and row.key != "optimizer.momentum":  # refusals.py has optim_args
        given = ", ".join(f"TrainingArguments.{name}={value}" for name, value in values.items())
        agreement.problems.append(
            f"{given} is for another optimizer: optimizer.name={optimizer.name} has no "
            f"{row.key.removeprefix('optimizer.')}. Leave it out, or set optimizer.name=adamw."
        )


def _take_micro_batches(agreement: Agreement, row: SharedSetting, args: Any, setting: str) -> None:
    """Cut the trainer's batch, which has all rows of a step, into micro-batches of the recipe's, for that setting."""
    rows, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    own = agreement.recipe.training
    size, wanted = own.per_device_train_batch_size, own.gradient_accumulation_steps
    as_one_batch = f"{setting} takes all micro-batches of a step as one batch: TrainingArguments."
    if steps != 1:
        agreement.problems.append(
            f"{as_one_batch}gradient_accumulation_steps must be 1, got {steps}. Set it to 1 and "
            f"per_device_train_batch_size={rows * steps}."
        )
    if rows % size:
        agreement.problems.append(
            f"{as_one_batch}per_device_train_batch_size must be a multiple of {size} "
            f"({_ROWS}={size}), got {rows}. Set it, or the recipe's."
        )
        return
    if wanted != rows // size and recipe_keys()[_STEPS].is_set_in(agreement.recipe):
        agreement.differ(row, f"{rows // size} (per_device_train_batch_size={rows})")
    agreement.set(_STEPS, rows // size)


def _take_model(agreement: Agreement, model: Any) -> None:
    """Take the properties of the trainer's own model."""
    own, causal_lm = agreement.recipe.model, base_model(model)
    attention = documented_name(causal_lm.config._attn_implementation)
    if own.dtype != "auto":
        agreement.follow_model("model.dtype", weights_type(causal_lm))
    agreement.follow_model("model.quantization", quantization_of(causal_lm))
    if attention in recipe_keys()["model.attn_implementation"].choices or own.attn_implementation != "auto":
        agreement.follow_model("model.attn_implementation", attention)
    name = causal_lm.name_or_path or type(causal_lm).__name__
    if own.name_or_path is None:
        agreement.set("model.name_or_path", name)
    elif name != own.name_or_path and (other := ", ".join(_other_shape(own, causal_lm))):
        agreement.differences.append(
            Difference(
                key="model.name_or_path",
                recipes=own.name_or_path,
                trainers=f"{name} ({other})",
                used="trainer",
            )
        )
        agreement.set("model.name_or_path", name)
    _take_adapter(agreement, model)


def _other_shape(recipes: ModelConfig, causal_lm: Any) -> Iterator[str]:
    """Yield what the trainer's model has otherwise than the recipe's, if that is a local folder or in the catalogue."""
    theirs, ours = causal_lm.config.get_text_config(), text_fields(recipes)
    for name in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size"):
        value = getattr(theirs, name, None)
        if None not in (value, ours.get(name)) and value != ours[name]:
            yield f"{name} {value}, not {ours[name]}"


def _take_adapter(agreement: Agreement, model: Any) -> None:
    """Take the adapter of a PEFT model; a plain model has no adapter, and gets none here."""
    configs = getattr(model, "peft_config", None) if hasattr(model, "get_base_model") else None
    if configs is None:
        agreement.follow_model("adapter.name", "none")
        return
    config = configs[model.active_adapter if isinstance(model.active_adapter, str) else next(iter(configs))]
    if config.peft_type != "LORA":
        agreement.problems += _problems_with_adapter(agreement.recipe, str(config.peft_type.value))
        agreement.set(
            "adapter.name", "lora"
        )  # to the rules: weights are frozen, and what is trained is small
        return
    agreement.set("adapter.name", "lora")
    for name in ("r", "lora_alpha", "lora_dropout", "use_dora", "use_rslora"):
        agreement.follow_model(f"adapter.{name}", getattr(config, name))
    causal_lm, own = base_model(model), agreement.recipe.adapter
    modules, parameters = _adapted(causal_lm)
    if own.target_modules != (ALL_LINEAR,):
        names = [name for name, _ in causal_lm.named_modules()]
        agreement.follow_model("adapter.target_modules", _as_asked(own.target_modules, modules, names))
    if own.target_parameters:
        names = [name.replace(".base_layer", "") for name, _ in causal_lm.named_parameters()]
        agreement.follow_model(
            "adapter.target_parameters", _as_asked(own.target_parameters, parameters, names)
        )


_NAMES = (
    "ADALORA BEFT BOFT C3A DEFT DELORA FOURIERFT FROD GLORA GRALORA HIRA HRA IA3 LN_TUNING LOHA LOKR MISS OFT OSF "
    "PEANUT PROMPT_TUNING PSOFT PVERA P_TUNING RANDLORA SHIRA SUPERTUNING TINYLORA UNILORA VBLORA VERA WAVEFT"
)
PASSED_THROUGH = frozenset(_NAMES.split())
"""PEFT's other adapters that train next to our techniques as they do alone; tests/hf holds each to its losses.

Not among them are those that put keys into a cache, which recomputation would need a second time (PREFIX_TUNING,
CARTRIDGE), and those that choose by all rows of a batch (LILY).
"""


def _problems_with_adapter(recipe: Recipe, kind: str) -> Iterator[str]:
    """Yield why an adapter of PEFT other than LoRA cannot be trained."""
    if kind not in PASSED_THROUGH:
        yield f"hf.attach() supports PEFT's LoRA, got {kind}. Train other adapters without it."
    if recipe.adapter.name != "none":
        yield (
            f"adapter.name={recipe.adapter.name} is decided as a model is made, and the trainer's has PEFT's {kind}. "
            "Leave adapter.* out of the recipe."
        )


def _adapted(causal_lm: torch.nn.Module) -> tuple[set[str], set[str]]:
    """Return the names of modules that have adapters, and of parameters that have their own."""
    layers = adapted_layers(causal_lm)
    of_parameters = {name: layer for name, layer in layers.items() if hasattr(layer, "parameter_name")}
    return {name for name in layers if name not in of_parameters}, {
        f"{name.replace('.base_layer', '')}.{layer.parameter_name}" for name, layer in of_parameters.items()
    }


def _as_asked(asked: tuple[str, ...], adapted: set[str], names: Collection[str]) -> tuple[str, ...]:
    """Return a recipe's names if exactly those have adapters, else the names within a layer of those that have."""
    ends = tuple(f".{one}" for one in asked)
    if {name for name in names if f".{name}".endswith(ends)} == adapted:
        return asked
    return tuple(sorted({name.rpartition(".")[2] for name in adapted}))
