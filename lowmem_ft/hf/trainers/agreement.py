"""Values that both a recipe and a trainer set: the trainer's is used, or an error is raised.

The trainer has batches, precision, learning rate and seed, and it has the model. A recipe that leaves one of these at
its default follows the trainer; one that sets another value is refused with both names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lowmem_ft.data.config import DataConfig
from lowmem_ft.hf.script.script_model import numbers_by_type, quantization_of
from lowmem_ft.hf.script.script_optimizer import names_optimizer, optim_args
from lowmem_ft.hf.trainers.argument_overrides import overridden_keys, plain
from lowmem_ft.hf.trainers.checkpointing_switch import asked_by_flag
from lowmem_ft.hf.trainers.key_table import IN_TRAINER
from lowmem_ft.hf.trainers.trainer_kinds import Kind, problems_of_kind, refused_defaults
from lowmem_ft.recipe import Recipe, TrainingConfig
from lowmem_ft.recipe.plan_config import PlanConfig
from lowmem_ft.recipe.reading.keys import as_typed, recipe_keys
from lowmem_ft.recipe.rules.conflicts import recipe_problems
from lowmem_ft.techniques.modules.base_model import base_model

_BY_TRAINER = ("data", "training", "plan")
"""Groups of a recipe that a trainer has instead, except for the keys that :func:`agree` reads."""


@dataclass
class Agreement:
    """The recipe that a trainer is to train with.

    Attributes:
        recipe: the recipe, with the trainer's values where it has them.
        overridden: the keys on which a user overrode the recipe in the trainer's arguments.
        problems: values on which the two disagree, and what cannot work.
        read: the keys that both set.
        overrides: the keys of ``overridden`` that were taken, with both values, in words.
    """

    recipe: Recipe
    overridden: Collection[str] = ()
    problems: list[str] = field(default_factory=list)
    read: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)

    def take(self, path: str, source: str, value: Any) -> None:
        """Train with a trainer's value; add a problem if the recipe has another that was not overridden.

        Args:
            path: the path of the recipe's key.
            source: the trainer's name for it, such as ``TrainingArguments.learning_rate``.
            value: the trainer's value.
        """
        key = recipe_keys()[path]
        own = key.value_in(self.recipe)
        if own != value and path in self.overridden:
            self.overrides.append(f"{source}={as_typed(value)} for {key.setting(own)}")
        elif own not in (key.default, value):
            self.problems.append(
                f"{key.setting(own)} differs from the trainer's {source}={as_typed(value)}, which the trainer uses. "
                f"Change one of them, or leave {path} out of the recipe."
            )
        self.read.append(path)
        self.set(path, value)

    def set(self, path: str, value: Any) -> None:
        """Change the recipe."""
        group, _, name = path.rpartition(".")
        part = dataclasses.replace(getattr(self.recipe, group), **{name: value})
        self.recipe = dataclasses.replace(self.recipe, **{group: part})


def agree(trainer: Any, recipe: Recipe, kind: Kind) -> Agreement:
    """Bring a recipe and a trainer together.

    Args:
        trainer: the trainer whose arguments, model and accelerator are read.
        recipe: the recipe to attach.
        kind: the kind of the trainer.

    Returns:
        The recipe to switch on, and all problems with it.
    """
    agreement = Agreement(recipe, overridden_keys(trainer.args, recipe))
    agreement.problems += [
        f"{setting} leaves a choice to the planner, but an attached recipe must have all choices made. Plan first, "
        "with `lowmem-ft plan ... --write my.yaml`, and load that."
        for setting in recipe.left_to_choose
    ]
    _take_arguments(agreement, trainer)
    _take_optimizer_arguments(agreement, trainer.args)
    _take_batch(agreement, trainer.args)
    _take_model(agreement, trainer.model)
    problems = asked_by_flag(agreement, trainer.args)
    of_kind = list(problems_of_kind(agreement.recipe, kind))
    for row in refused_defaults(agreement.recipe, kind):
        agreement.set(row.key, row.off)
    taken = agreement.recipe
    training = {
        key: getattr(taken.training, key.rpartition(".")[2]) for key in agreement.read if "training." in key
    }
    agreement.recipe = dataclasses.replace(
        taken,
        data=DataConfig(),
        plan=PlanConfig(),
        training=TrainingConfig(
            **{path.rpartition(".")[2]: value for path, value in training.items()},
            max_skipped_steps=taken.training.max_skipped_steps,
        ),
    )
    agreement.problems += [*problems, *of_kind]
    # Refusals of a trainer have been reported; the rules would repeat them in other words.
    agreement.problems += [] if of_kind else recipe_problems(agreement.recipe)
    return agreement


def unread_settings(recipe: Recipe, args: Any, read: list[str]) -> Iterator[str]:
    """Yield settings of a recipe that are left to a trainer and its script, except those that its arguments share."""
    for path, key in recipe_keys().items():
        value, fields = key.value_in(recipe), IN_TRAINER[path].fields(recipe)
        is_read = path in read or path == "training.max_skipped_steps"
        says_the_same = fields and all(
            plain(getattr(args, name, None)) == plain(fields[name]) for name in fields
        )
        if path.partition(".")[0] in _BY_TRAINER and not (is_read or says_the_same) and value != key.default:
            yield key.setting(value)


def _take_arguments(agreement: Agreement, trainer: Any) -> None:
    args = trainer.args
    for path, name, value in (
        ("training.learning_rate", "learning_rate", args.learning_rate),
        ("training.max_grad_norm", "max_grad_norm", args.max_grad_norm or None),
        ("training.seed", "seed", args.seed),
        ("training.full_determinism", "full_determinism", args.full_determinism),
        ("training.use_cpu", "use_cpu", args.device.type == "cpu"),
    ):
        agreement.take(path, f"TrainingArguments.{name}", value)
    precision = trainer.accelerator.mixed_precision
    if precision != (
        "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
    ):  # the launcher's configuration has it
        agreement.overridden = set(agreement.overridden) - {"training.mixed_precision"}
    agreement.take("training.mixed_precision", "trainer.accelerator.mixed_precision", precision)


def _take_optimizer_arguments(agreement: Agreement, args: Any) -> None:
    """Take hyperparameters by HF's names; those that the optimizer lacks must be at their defaults."""
    agreement.take("optimizer.weight_decay", "TrainingArguments.weight_decay", args.weight_decay)
    defaults = {spec.name: spec.default for spec in dataclasses.fields(args)}
    own = agreement.recipe.optimizer.row.hyperparameters
    is_named = names_optimizer(args, agreement.recipe.optimizer.name)
    if is_named and "momentum" in own:
        momentum = float(optim_args(args).get("momentum", 0))
        agreement.take("optimizer.momentum", "momentum in TrainingArguments.optim_args", momentum)
    for name, fields in {"betas": ("adam_beta1", "adam_beta2"), "eps": ("adam_epsilon",)}.items():
        values = tuple(getattr(args, one) for one in fields)
        is_default = values == tuple(defaults[one] for one in fields)
        source = " and ".join(f"TrainingArguments.{one}" for one in fields)
        is_said = is_named or own.get(name) == _one(values) or not is_default or _set(agreement, name)
        if name in own and is_said:
            agreement.take(f"optimizer.{name}", source, _one(values))
        elif name not in own and not is_default:
            agreement.problems.append(
                f"{source} is set to {as_typed(_one(values))}, and "
                f"optimizer.name={agreement.recipe.optimizer.name} has no {name}. Leave it out, or set "
                "optimizer.name=adamw."
            )


def _set(agreement: Agreement, name: str) -> bool:
    return getattr(agreement.recipe.optimizer, name) is not None


def _one(values: Sequence[Any]) -> Any:
    return tuple(values) if len(values) > 1 else values[0]


def _take_batch(agreement: Agreement, args: Any) -> None:
    """Take rows and micro-batches; in vertical order the trainer's batch is all of them, the recipe sets the rows."""
    rows, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    if agreement.recipe.accumulation.order == "horizontal":
        agreement.take(
            "training.per_device_train_batch_size", "TrainingArguments.per_device_train_batch_size", rows
        )
        agreement.take(
            "training.gradient_accumulation_steps", "TrainingArguments.gradient_accumulation_steps", steps
        )
        return
    own = agreement.recipe.training
    size, wanted = own.per_device_train_batch_size, own.gradient_accumulation_steps
    if rows != size * wanted and "training.per_device_train_batch_size" in agreement.overridden:
        agreement.overrides.append(
            f"TrainingArguments.per_device_train_batch_size={rows} for {size} * {wanted}"
        )
        wanted = 1
    agreement.read += ["training.per_device_train_batch_size", "training.gradient_accumulation_steps"]
    if steps != 1:
        agreement.problems.append(
            "accumulation.order=vertical takes all micro-batches of a step as one batch: "
            f"TrainingArguments.gradient_accumulation_steps must be 1, got {steps}. Set it to 1 and "
            f"per_device_train_batch_size={rows * steps}."
        )
    if rows % size or (wanted > 1 and rows != size * wanted):
        times = f"{size} * {wanted}, the recipe's micro-batches" if wanted > 1 else f"a multiple of {size}"
        agreement.problems.append(
            "accumulation.order=vertical takes all micro-batches of a step as one batch: "
            f"TrainingArguments.per_device_train_batch_size must be {times} "
            f"(training.per_device_train_batch_size={size}), got {rows}. Set it, or the recipe's."
        )
        return
    agreement.set("training.gradient_accumulation_steps", rows // size)


def _take_model(agreement: Agreement, model: Any) -> None:
    """Take the properties of the trainer's own model; most are settled with the weights."""
    own = agreement.recipe.model
    causal_lm = base_model(model)
    dtype = weights_type(causal_lm)
    if own.dtype != "auto":
        agreement.take("model.dtype", "the model's own type", dtype)
    quantization = quantization_of(causal_lm)
    if own.quantization not in ("none", quantization):
        agreement.problems.append(
            f"model.quantization={own.quantization} happens when weights are read, and the trainer's model has "
            f"{quantization}. Pass model=hf.prepare_model(name, recipe) to the trainer."
        )
    attention = causal_lm.config._attn_implementation
    if own.attn_implementation not in ("auto", attention):
        agreement.problems.append(
            f"model.attn_implementation={own.attn_implementation} is chosen when a model is loaded, and the trainer's "
            f"model has {attention}. Pass model=hf.prepare_model(name, recipe) to the trainer."
        )
    agreement.set("model.quantization", quantization)
    if attention in recipe_keys()["model.attn_implementation"].choices:
        agreement.set("model.attn_implementation", attention)
    agreement.set(
        "model.name_or_path", own.name_or_path or causal_lm.name_or_path or type(causal_lm).__name__
    )
    _take_adapter(agreement, model)


def _take_adapter(agreement: Agreement, model: Any) -> None:
    """Take the adapter of a PEFT model; a plain model has no adapter, and gets none here."""
    configs = getattr(model, "peft_config", None) if hasattr(model, "get_base_model") else None
    if configs is None:
        if agreement.recipe.adapter.name != "none":
            agreement.problems.append(
                f"adapter.name={agreement.recipe.adapter.name} needs a PEFT model before the trainer is made, got a "
                f"{type(model).__name__}. Pass model=hf.prepare_model(model, recipe) or peft_config= to the trainer."
            )
        return
    config = configs[model.active_adapter if isinstance(model.active_adapter, str) else next(iter(configs))]
    if config.peft_type != "LORA":
        agreement.problems.append(
            f"hf.attach() supports PEFT's LoRA, got {config.peft_type}. Train other adapters without it."
        )
        return
    agreement.set("adapter.name", "lora")
    for name in ("r", "lora_alpha", "lora_dropout", "use_dora", "use_rslora"):
        agreement.take(f"adapter.{name}", f"LoraConfig.{name}", getattr(config, name))


def weights_type(causal_lm: torch.nn.Module) -> str:
    """Return the type of most of the base's weights, such as ``bfloat16``; an adapter's own weights do not count."""
    ((dtype, _),) = numbers_by_type(causal_lm).most_common(1)
    return str(dtype).removeprefix("torch.")
