"""A recipe read from a user's training script, so that it can be estimated and planned."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from lowmem_ft.data.config import DataConfig
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.planning.script_recipes.row_lengths import longest_row, row_length
from lowmem_ft.planning.script_recipes.script_model import adapter_config, model_config
from lowmem_ft.planning.script_recipes.script_optimizer import optimizer_config
from lowmem_ft.planning.script_recipes.trl_loss import trl_loss
from lowmem_ft.planning.script_recipes.untranslated import Reading, script_estimate
from lowmem_ft.planning.script_runs.trainers import gathers_logits
from lowmem_ft.recipe import Recipe, TrainingConfig, check_recipe
from lowmem_ft.recipe.reading.keys import recipe_keys
from lowmem_ft.recipe.trainers.shared_settings import read_group
from lowmem_ft.techniques.adapters.config import AdapterConfig
from lowmem_ft.techniques.checkpointing.config import CheckpointingConfig
from lowmem_ft.techniques.loss.config import LossConfig
from lowmem_ft.techniques.modules.model_parts import base_model
from lowmem_ft.techniques.modules.supported_models import problem_with_class
from lowmem_ft.techniques.offload.config import OffloadConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_UNLIKE: Mapping[str, tuple[Any, str]] = {
    "auto_find_batch_size": (
        False,
        "the estimate is for per_device_train_batch_size, before it is halved",
    ),
    "torch_compile": (False, "compiled kernels keep fewer activations than the estimate counts"),
    "deepspeed": (None, "a recipe describes one process that holds everything"),
    "fsdp": (None, "a recipe describes one process that holds everything"),
    "optim_target_modules": (None, "the optimizer keeps projections instead of full state"),
}
"""Fields that change a step's memory and have no counterpart: the value that switches them off, and the consequence."""

_REFUSED = ("deepspeed", "fsdp", "optim_target_modules")


@dataclass(frozen=True, kw_only=True)
class Script:
    """The parts of a script that decide a step.

    Args:
        args: its arguments.
        model: its model, with adapters.
        optimizer: the optimizer that it passes; None: the arguments name it.
        longest_row: tokens of its longest row; None: not known.
        collator: the collator that makes its batches.
        evaluates: whether it has held-out data.
        keeps_logits: whether an evaluation gathers the logits of all held-out data.
        has_fused_head: whether the loss is TRL's, which never holds all logits.
    """

    args: TrainingArguments
    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    longest_row: int | None = None
    collator: Any = None
    evaluates: bool = False
    keeps_logits: bool = False
    has_fused_head: bool = False


def recipe_from(
    trainer: Trainer | TrainingArguments,
    model: PreTrainedModel | nn.Module | str | None = None,
    *,
    max_length: int | None = None,
) -> Recipe:
    """Return the recipe of a script that trains with ``transformers.Trainer`` or ``trl.SFTTrainer``.

    It holds what decides memory: model, type, adapters, rows, optimizer, checkpointing. ``estimate_memory`` and
    ``plan`` take it like any other. Settings that a recipe cannot express cause a warning with their consequence for
    memory, or an error. Data stays the script's own. Torch's AdamW over 16-bit weights, which keeps no masters and has
    its averages in the weights' type, becomes ``optimizer.master=none`` with ``optimizer.state=bf16``.

    Args:
        trainer: a trainer before ``hf.attach`` and ``train()``; or the arguments alone, with ``model``.
        model: with arguments: the model, or the name by which the script loads it.
        max_length: tokens of the longest row; None: as the arguments and the trainer's data have it.

    Returns:
        The recipe. A model without files is named by a folder that is deleted with this process.

    Raises:
        UserError: if a recipe cannot describe the script, with all reasons at once.
    """
    if isinstance(trainer, Trainer):
        if model is not None:
            raise UserError(
                "recipe_from takes a trainer, or arguments and a model; got a trainer and a model."
            )
        return recipe_of(_script_of(trainer), max_length=max_length)
    if model is None:
        raise UserError(
            "recipe_from takes a trainer, or arguments and a model; got arguments alone. Pass the model."
        )
    refuse_other_losses(trainer)
    if isinstance(model, str):
        script = Script(args=trainer, model=nn.Module(), has_fused_head=is_sft(type(trainer)))
        return _read(script, _named_model(trainer, model), AdapterConfig(), max_length, Reading())
    script = Script(args=trainer, model=model, has_fused_head=is_sft(type(trainer)))
    return recipe_of(script, max_length=max_length)


def recipe_of(script: Script, *, max_length: int | None = None) -> Recipe:
    """Return the recipe of a script's parts; see :func:`recipe_from`.

    Args:
        script: its parts.
        max_length: tokens of the longest row; None: as the script has it.

    Returns:
        The recipe.

    Raises:
        UserError: if a recipe cannot describe it.
    """
    if clause := problem_with_class(script.model):
        raise UserError(f"A recipe describes {clause}. {script_estimate()}")
    reading = Reading()
    model, adapter = model_config(script.model, reading), adapter_config(script.model, reading)
    return _read(script, model, adapter, max_length, reading)


def _script_of(trainer: Any) -> Script:
    refuse_other_losses(trainer)
    data = [one for one in (trainer.train_dataset, trainer.eval_dataset) if one is not None]
    return Script(
        args=trainer.args,
        model=trainer.model,
        optimizer=trainer.optimizer,
        longest_row=longest_row(data, trainer.data_collator),
        collator=trainer.data_collator,
        evaluates=trainer.eval_dataset is not None,
        keeps_logits=gathers_logits(trainer),
        has_fused_head=is_sft(type(trainer)),
    )


def _is_trl_but_not_sft(kind: type) -> bool:
    names = [one.__name__ for one in kind.__mro__ if one.__module__.startswith("trl.")]
    return bool(names) and not {"SFTTrainer", "SFTConfig"} & set(names)


def is_sft(kind: type) -> bool:
    """Return whether a trainer or its arguments are those of TRL's SFT, or derived from them."""
    return any(one.__name__ in ("SFTTrainer", "SFTConfig") for one in kind.__mro__)


def refuse_other_losses(script: Trainer | TrainingArguments) -> None:
    """Refuse losses that a recipe does not train.

    Args:
        script: the script's trainer, or the trainer's arguments.

    Raises:
        UserError: if it is one of TRL's trainers other than SFT.
    """
    if _is_trl_but_not_sft(type(script)):
        raise UserError(
            f"A recipe trains a model on next tokens, and {type(script).__name__} does more in a step: reference "
            "models, pairs of answers, generation. It cannot be estimated or planned from a recipe. "
            f"{script_estimate()} The hf.attach line of its output names the settings to attach and their savings; "
            "`--gpu all` shows where it fits."
        )


def _named_model(args: Any, name: str) -> ModelConfig:
    """Return the model as ``from_pretrained`` loads it: TRL defaults to float32, transformers to the file's type."""
    options = getattr(args, "model_init_kwargs", None) or {}
    dtype = options.get("dtype", "float32" if is_sft(type(args)) else "auto")
    return ModelConfig(name_or_path=name, dtype=str(dtype).removeprefix("torch."))  # type: ignore[arg-type]


def _read(
    script: Script, model: ModelConfig, adapter: AdapterConfig, max_length: int | None, reading: Reading
) -> Recipe:
    args: Any = script.args
    _note_unlike(script, reading)
    if args.use_liger_kernel:
        model = dataclasses.replace(model, kernels="auto")  # what Liger lacks here is no error of the script
    is_checkpointed = args.gradient_checkpointing or _is_checkpointed(script.model)
    is_offloaded = getattr(args, "activation_offloading", False)
    recipe = Recipe(
        name="script",
        model=model,
        adapter=adapter,
        data=_data(script, max_length),
        training=_training(script, reading),
        optimizer=optimizer_config(
            args,
            script.model,
            script.optimizer,
            keeps_no_masters=model.dtype == "bfloat16" and adapter.name == "none",
            reading=reading,
        ),
        checkpointing=CheckpointingConfig(mode="full" if is_checkpointed else "none"),
        offload=OffloadConfig(activations="all" if is_offloaded else "none"),
        loss=LossConfig(chunk_tokens=None),
    )
    if script.has_fused_head:
        recipe = dataclasses.replace(recipe, loss=trl_loss(recipe, _vocabulary(script.model), reading))
    _note_casts_of_adapters(script, recipe, reading)
    reading.finish()
    check_recipe(recipe)
    return recipe


def _is_checkpointed(model: nn.Module) -> bool:
    """Return whether the script has switched it on itself; each module that can be checkpointed has a flag."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def _data(script: Script, max_length: int | None) -> DataConfig:
    packing = bool(getattr(script.args, "packing", False))
    said = max_length if max_length is not None else getattr(script.args, "max_length", None)
    length = row_length(said, script.longest_row, packed=packing, collator=script.collator or script.args)
    return DataConfig(
        max_length=length, packing=packing, eval_split="validation" if script.evaluates else None
    )


def _training(script: Script, reading: Reading) -> TrainingConfig:
    args: Any = script.args
    named = read_group(args, "training")
    if not script.evaluates:
        named["eval_steps"] = None
    if named["mixed_precision"] not in recipe_keys()["training.mixed_precision"].choices:
        reading.problem(
            f"A recipe's mixed precision is bf16, fp16 or no, and the script's is {named['mixed_precision']}. "
            f"{script_estimate()}"
        )
        named["mixed_precision"] = "no"
    # HF accepts what a recipe refuses: a warmup in a schedule that has no warmup, or one longer than the run.
    named["warmup_steps"] = float(args.warmup_steps)
    if args.max_steps > 0:
        named["warmup_steps"] = min(named["warmup_steps"], float(args.max_steps))
    schedule = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    if schedule == "constant":
        named["warmup_steps"] = 0.0
    if schedule in recipe_keys()["training.lr_scheduler_type"].choices:
        named["lr_scheduler_type"] = schedule
        named["lr_scheduler_kwargs"] = args.lr_scheduler_kwargs or None
    else:
        named["warmup_steps"] = 0.0
        reading.warn(f"lr_scheduler_type={schedule} has no counterpart in a recipe. It takes no memory.")
    return TrainingConfig(**named)


def _note_unlike(script: Script, reading: Reading) -> None:
    args: Any = script.args
    for name, (off, consequence) in _UNLIKE.items():
        value = getattr(args, name, off)
        if value and value != off:
            say = reading.problem if name in _REFUSED else reading.warn
            say(f"{name}={value} has no counterpart in a recipe: {consequence}.")
    rows, vocabulary = args.per_device_train_batch_size, _vocabulary(script.model)
    logits = (
        f"{format_bytes(rows * vocabulary * 4 * (script.longest_row or 1))}" if vocabulary else "the logits"
    )
    if args.label_smoothing_factor:
        reading.warn(
            f"label_smoothing_factor={args.label_smoothing_factor} keeps log-probabilities of every token in addition "
            f"to the logits, about {logits} more than the estimate counts."
        )
    if args.use_liger_kernel and not script.has_fused_head:
        reading.warn(
            "use_liger_kernel=True also replaces the loss, which a recipe cannot express: it holds fewer logits than "
            "the estimate counts."
        )
    if script.keeps_logits and script.evaluates:
        reading.warn(
            "compute_metrics gathers the logits of all held-out rows on the device, which the estimate does not count. "
            "Set eval_accumulation_steps, or pass preprocess_logits_for_metrics."
        )


def _note_casts_of_adapters(script: Script, recipe: Recipe, reading: Reading) -> None:
    """Warn: PEFT casts each float32 adapter's input to float32, autocast casts it back, and backward keeps it."""
    if recipe.training.mixed_precision == "no" or recipe.adapter.name == "none":
        return
    layers: list[Any] = [
        module for name, module in script.model.named_modules() if name.endswith("lora_A.default")
    ]
    width = sum(layer.in_features for layer in layers if layer.weight.dtype == torch.float32)
    if recipe.checkpointing.mode == "full":
        width //= max(1, base_model(script.model).config.get_text_config().num_hidden_layers)
    tokens = recipe.training.per_device_train_batch_size * (recipe.data.max_length or 1)
    if more := 2 * tokens * width:
        reading.warn(
            "PEFT copies the input of each adapter to float32 and back, which our own loop does not: about "
            f"{format_bytes(more)} more than the estimate counts, and it takes some time."
        )


def _vocabulary(model: nn.Module) -> int:
    if not hasattr(model, "config"):
        return 0
    return int(getattr(base_model(model).config.get_text_config(), "vocab_size", 0))
