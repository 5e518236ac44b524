"""The table of settings that a recipe and a trainer's arguments both have, and of who decides where they differ.

A recipe has the techniques, the optimizer and its formats, chunks, the window of micro-batches and clipping; a trainer
has data, steps, schedule and precision. ``hf.training_arguments`` writes a recipe's side into arguments,
``hf.recipe_from`` reads a script's arguments as a recipe, and ``hf.attach`` compares the two. A key that is not here
has no argument: ``hf.prepare_model`` reads those of the model, ``hf.attach`` those of the techniques, and the script
has its own data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lowmem_ft.optimizers.table import OPTIMIZERS, OptimizerName
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.reading.keys import key_with, recipe_keys
from lowmem_ft.recipe.rules.output_folder import run_folder_of

Fields = Mapping[str, Any]

Decides = Literal["trainer", "recipe", "technique"]
"""The side whose value a run uses where the recipe sets one and the trainer has another.

trainer: the trainer's, and the difference is listed.
recipe: the recipe's, and the difference is listed; the trainer's, if a user overrode the argument by name.
technique: the recipe's; an override by name is refused as the arguments are made, and ``refusals.py`` has the rest.
"""


@dataclass(frozen=True)
class SharedSetting:
    """One key of a recipe that arguments have, too.

    Args:
        key: its dotted path.
        fields: the recipe's value as arguments, by their names upstream; a class of arguments without such a name
            skips them.
        decides: whose value is used where they differ.
        read: the arguments' value in the recipe's terms; None: it is not one value, or a recipe of a script needs none.
        in_step: whether a part of a step depends on it, so that ``attach`` takes the trainer's value.
        of_trainer: a trainer's value where that may be another than its arguments'; None: it is the same.
        follows_default: whether ``attach`` takes the trainer's value where the recipe has the default, which is off.
    """

    key: str
    fields: Callable[[Recipe], Fields]
    decides: Decides = "trainer"
    read: Callable[[Any], Any] | None = None
    in_step: bool = False
    of_trainer: Callable[[Any], Any] | None = None
    follows_default: bool = False

    def value(self, trainer: Any) -> Any:
        """Return a trainer's value in the recipe's terms."""
        if self.of_trainer is not None:
            return self.of_trainer(trainer)
        assert self.read is not None
        return self.read(trainer.args)


HF_OPTIMIZERS: Mapping[OptimizerName, str] = {
    "adamw": "adamw_torch_fused",
    "sgd": "sgd",
    "adafactor": "adafactor",
    **{name: name for name, row in OPTIMIZERS.items() if row.bitsandbytes is not None},
}
"""Our optimizers by their names in ``TrainingArguments.optim``; only ``attach`` knows the others."""

BY_HF_NAME: Mapping[str, OptimizerName] = {
    **{theirs: ours for ours, theirs in HF_OPTIMIZERS.items()},
    "adamw_torch": "adamw",
    "adamw_8bit": "adamw_bnb_8bit",
}
"""Upstream's optimizer names that have a counterpart of ours."""

HYPERPARAMETERS = {
    "optimizer.betas": ("adam_beta1", "adam_beta2"),
    "optimizer.eps": ("adam_epsilon",),
    "optimizer.momentum": ("optim_args",),
}
"""Hyperparameters that not every optimizer has, and their arguments."""

_LOOP_ONLY = {
    "training.overwrite_output_dir": "Delete the folder, or set training.output_dir to another one.",
    "training.early_stopping_": "Leave it out, and add transformers' EarlyStoppingCallback to the trainer.",
    "budget.retry": "Leave it out: a step of a Trainer that runs out of memory ends the run.",
    "distributed.": "Leave it out: the script's launcher sets the number of processes. DDP and FSDP 2 work in a "
    "Trainer, DeepSpeed in `lowmem-ft train`.",
}
"""Keys, or groups of them, that no trainer can act on, and what a script does instead."""


_OVERRIDES = "_lowmem_ft_overrides"
"""Name of the arguments' attribute; its values are plain, as a trainer pickles its arguments into every checkpoint."""


def settings_for_our_loop(recipe: Recipe) -> dict[str, str]:
    """Return a recipe's settings that only our own loop acts on, each with what a script does instead."""
    return {
        key.setting(key.value_in(recipe)): instead
        for path, key in recipe_keys().items()
        for prefix, instead in _LOOP_ONLY.items()
        if path.startswith(prefix) and key.value_in(recipe) != key.default
    }


def plain(value: Any) -> Any:
    """Return an enum of transformers as its text, and None as False, as HF's flags treat them alike."""
    value = getattr(value, "value", value)
    return False if value is None else value


def keep_overrides(args: Any, names: Iterable[str]) -> None:
    """Record with arguments which fields a user gave by name, over a recipe's, as they were made."""
    setattr(args, _OVERRIDES, {name: plain(getattr(args, name, None)) for name in names})


def overridden(args: Any) -> frozenset[str]:
    """Return the fields that were given by name, as far as they have the values that they had then."""
    given = getattr(args, _OVERRIDES, {})
    return frozenset(name for name, value in given.items() if plain(getattr(args, name, None)) == value)


def optim_args(args: Any) -> dict[str, str]:
    """Parse what HF takes as text, for some optimizers: ``momentum=0.9,nesterov=true``."""
    pairs = (pair.partition("=") for pair in (args.optim_args or "").replace(" ", "").split(",") if pair)
    return {name: value for name, _, value in pairs}


def names_optimizer(args: Any, name: OptimizerName) -> bool:
    """Return whether ``TrainingArguments.optim`` is this one of ours, which Trainer would make from its own fields."""
    return _optimizer(args) == name


def _optimizer(args: Any) -> OptimizerName | None:
    return BY_HF_NAME.get(str(plain(args.optim)))


def _named(
    key: str,
    fields: Callable[[Recipe], Fields] | None = None,
    *,
    argument: str = "",
    decides: Decides = "trainer",
    is_read: bool = False,
    in_step: bool = False,
) -> SharedSetting:
    """Return the row of a key whose argument has the same values, and the same name if no other is given.

    What is in a step is read, too.
    """
    name = argument or key.rpartition(".")[2]
    return SharedSetting(
        key,
        fields or (lambda recipe: {name: recipe_keys()[key].value_in(recipe)}),
        decides,
        read=(lambda args: getattr(args, name)) if is_read or in_step else None,
        in_step=in_step,
    )


def _off(key: str, *arguments: str) -> SharedSetting:
    """Return the row of a technique whose counterparts upstream stay off, as both at once would do the work twice."""
    return SharedSetting(
        key, lambda recipe: dict.fromkeys(arguments, False), "technique", follows_default=True
    )


def _batch(recipe: Recipe) -> Fields:
    """Return the batch: all rows of a step for a technique that takes these at once, cut by ``attach``."""
    training = recipe.training
    rows, steps = training.per_device_train_batch_size, training.gradient_accumulation_steps
    if key_with(recipe, "whole window at once"):
        rows, steps = rows * steps, 1
    return {"per_device_train_batch_size": rows, "gradient_accumulation_steps": steps}


def _evaluation_rows(recipe: Recipe) -> Fields:
    training = recipe.training
    rows = training.per_device_eval_batch_size or training.per_device_train_batch_size
    return {"per_device_eval_batch_size": rows}


def _every(moment: str) -> SharedSetting:
    def fields(recipe: Recipe) -> Fields:
        steps = getattr(recipe.training, f"{moment}_steps")
        if steps is None:
            return {f"{moment}_strategy": "no"}
        return {f"{moment}_strategy": "steps", f"{moment}_steps": steps}

    def read(args: Any) -> int | None:
        """Return whole steps; None for epochs and shares of a run, whose length a recipe cannot know."""
        strategy, steps = getattr(args, f"{moment}_strategy"), getattr(args, f"{moment}_steps")
        return int(steps) if strategy == "steps" and steps is not None and steps >= 1 else None

    return SharedSetting(f"training.{moment}_steps", fields, read=read)


def _resumed(recipe: Recipe) -> Fields:
    """Resolve ``auto``: the script passes the field to Trainer's ``train()``, which takes ``auto`` for a path."""
    wanted = recipe.training.resume_from_checkpoint
    if wanted == "auto":
        from transformers.trainer_utils import get_last_checkpoint

        folder = run_folder_of(recipe)
        wanted = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    return {"resume_from_checkpoint": wanted}


def _if_set(name: str, value: Any) -> Fields:
    return {} if value is None else {name: value}


def _adam(key: str) -> SharedSetting:
    """Return the row of a hyperparameter that has arguments of its own, which several optimizers read."""
    names = HYPERPARAMETERS[key]

    def fields(recipe: Recipe) -> Fields:
        value = recipe.optimizer.hyperparameters().get(key.removeprefix("optimizer."))
        values = value if isinstance(value, tuple) else (value,)
        return {} if value is None else dict(zip(names, values, strict=True))

    def read(args: Any) -> Any:
        values: tuple[Any, ...] = tuple(getattr(args, name) for name in names)
        return values if len(values) > 1 else next(iter(values))

    return SharedSetting(key, fields, "recipe", read, in_step=True)


def _momentum(recipe: Recipe) -> Fields:
    momentum = recipe.optimizer.hyperparameters().get("momentum")
    return _if_set("optim_args", None if momentum is None else f"momentum={momentum}")


def _learnt_tokens(recipe: Recipe) -> Fields:
    by_choice: dict[str, Fields] = {
        "completion": {"completion_only_loss": True},
        "assistant": {"assistant_only_loss": True},
        "all": {"completion_only_loss": False},
    }
    return by_choice.get(recipe.data.loss_on, {})  # auto: TRL decides by the columns too


def _order_of_rows(recipe: Recipe) -> Fields:
    if recipe.data.group_by_length:
        return {"train_sampling_strategy": "group_by_length"}
    return {} if recipe.data.shuffle else {"train_sampling_strategy": "sequential", "shuffle_dataset": False}


SHARED_SETTINGS: tuple[SharedSetting, ...] = (
    _named("training.learning_rate", in_step=True),
    _named("training.lr_scheduler_type"),
    _named("training.lr_scheduler_kwargs"),
    _named("training.warmup_steps"),
    _named("training.num_train_epochs", is_read=True),
    _named("training.max_steps", is_read=True),
    _named("training.seed", in_step=True),
    _named("training.full_determinism", in_step=True),
    SharedSetting(
        "training.use_cpu",
        lambda recipe: {"use_cpu": recipe.training.use_cpu},
        read=lambda args: args.use_cpu,
        in_step=True,
        of_trainer=lambda trainer: trainer.args.device.type == "cpu",
    ),
    SharedSetting(
        "training.mixed_precision",
        lambda recipe: {name: recipe.training.mixed_precision == name for name in ("bf16", "fp16")},
        read=lambda args: args.mixed_precision,
        in_step=True,
        of_trainer=lambda trainer: trainer.accelerator.mixed_precision,
    ),
    _named("training.per_device_train_batch_size", _batch, in_step=True),
    _named("training.gradient_accumulation_steps", _batch, in_step=True),
    _named("training.per_device_eval_batch_size", _evaluation_rows, is_read=True),
    _named("training.output_dir", lambda recipe: {"output_dir": str(run_folder_of(recipe))}, is_read=True),
    _named("training.resume_from_checkpoint", _resumed),
    _named("training.report_to", lambda recipe: {"report_to": list(recipe.training.report_to)}),
    SharedSetting(
        "training.logging_steps",
        lambda recipe: {"logging_steps": recipe.training.logging_steps},
        read=lambda args: int(args.logging_steps) if args.logging_steps >= 1 else 1,
    ),
    _every("eval"),
    _named("training.eval_on_start"),
    _every("save"),
    _named("training.save_total_limit", is_read=True),
    _named("training.load_best_model_at_end"),
    _named("training.metric_for_best_model"),
    _named(
        "training.greater_is_better",
        lambda recipe: {"greater_is_better": recipe.training.greater_is_better or False},
    ),
    _named("training.project"),
    _named("training.run_name"),
    _named("training.push_to_hub"),
    _named("training.hub_model_id"),
    _named("training.hub_private_repo"),
    _named("data.max_length"),
    _named("data.packing"),
    _named("data.chat_template", argument="chat_template_path"),
    _named("data.num_proc", argument="dataset_num_proc"),
    _named("data.text_column", lambda recipe: _if_set("dataset_text_field", recipe.data.text_column)),
    SharedSetting("data.loss_on", _learnt_tokens),
    SharedSetting("data.group_by_length", _order_of_rows),
    SharedSetting("data.shuffle", _order_of_rows),
    _named("model.trust_remote_code"),
    SharedSetting(
        "training.max_grad_norm",
        lambda recipe: {"max_grad_norm": recipe.training.max_grad_norm or 0.0},
        "recipe",
        read=lambda args: args.max_grad_norm or None,
        in_step=True,
    ),
    _named("optimizer.weight_decay", decides="recipe", in_step=True),
    *map(_adam, ("optimizer.betas", "optimizer.eps")),
    SharedSetting(
        "optimizer.momentum",
        _momentum,
        "recipe",
        read=lambda args: float(optim_args(args).get("momentum", 0)),
        in_step=True,
    ),
    SharedSetting(
        "optimizer.name",
        lambda recipe: _if_set("optim", HF_OPTIMIZERS.get(recipe.optimizer.name)),
        "technique",
        read=_optimizer,
    ),
    _off("checkpointing.mode", "activation_checkpointing", "gradient_checkpointing"),
    _off("offload.activations", "activation_offloading"),
    _off("model.kernels", "use_liger_kernel"),
    # Trainer's own smoothing would take the labels away before the loss is computed.
    _named("loss.label_smoothing_factor", lambda _: {"label_smoothing_factor": 0.0}, decides="technique"),
)
"""The table."""


def read_group(args: Any, group: str) -> dict[str, Any]:
    """Return what arguments set in one group of a recipe, such as ``training``, by the names of its keys."""
    rows = [row for row in SHARED_SETTINGS if row.key.startswith(f"{group}.")]
    return {row.key.removeprefix(f"{group}."): row.read(args) for row in rows if row.read is not None}
