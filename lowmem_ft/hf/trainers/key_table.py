"""The table of every recipe key and its place in a script that trains with ``Trainer`` or one of TRL's trainers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lowmem_ft.optimizers.table import OPTIMIZERS, OptimizerName
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.rules.output_folder import run_folder_of

Carrier = Literal["arguments", "attach", "prepare_model", "callback", "script", "plan", "our loop", "nothing"]
"""The part of a script that carries a key.

arguments: fields of ``TrainingArguments`` or of TRL's configs, which ``attach`` reads in its turn. An override of such
  a field wins (``argument_overrides.py``); arguments that differ from a recipe for another reason are refused there.
attach: ``hf.attach``. Fields with the same meaning are set too, and an override to another value is refused.
prepare_model: ``hf.prepare_model``, or the script's own ``from_pretrained``.
callback: ``hf.MemoryCallback``.
script: the script's own data; fields of TRL's configs carry the rest.
plan: choices made before a recipe is given to a trainer; a choice left open is refused.
our loop: no part of a script; a value other than the default is refused.
nothing: words for people.
"""

Fields = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class _InTrainer:
    """The place of one key in a trainer's script.

    Args:
        carrier: the part that carries it.
        fields: fields with the same meaning, by their names upstream; a class of arguments without such a name skips
            them.
        instead: for ``our loop``: what a script does in its place.
    """

    carrier: Carrier
    fields: Callable[[Recipe], Fields] = lambda recipe: {}
    instead: str = ""


def _same_name(key: str) -> _InTrainer:
    name = key.rpartition(".")[2]
    return _InTrainer(carrier="arguments", fields=lambda recipe: {name: getattr(recipe.training, name)})


def _rows(recipe: Recipe) -> Fields:
    """Return the batch; in vertical order it holds all rows of a step, which ``attach`` cuts into micro-batches."""
    training = recipe.training
    rows, steps = training.per_device_train_batch_size, training.gradient_accumulation_steps
    if recipe.accumulation.order == "vertical":
        rows, steps = rows * steps, 1
    return {"per_device_train_batch_size": rows, "gradient_accumulation_steps": steps}


def _evaluation_rows(recipe: Recipe) -> Fields:
    training = recipe.training
    rows = training.per_device_eval_batch_size or training.per_device_train_batch_size
    return {"per_device_eval_batch_size": rows}


def _strategy(name: str) -> _InTrainer:
    def fields(recipe: Recipe) -> Fields:
        steps = getattr(recipe.training, f"{name}_steps")
        return (
            {f"{name}_strategy": "no"}
            if steps is None
            else {f"{name}_strategy": "steps", f"{name}_steps": steps}
        )

    return _InTrainer(carrier="arguments", fields=fields)


def _resumed(recipe: Recipe) -> Fields:
    """Resolve ``auto``: the script passes the field to Trainer's ``train()``, which takes ``auto`` for a path."""
    wanted = recipe.training.resume_from_checkpoint
    if wanted == "auto":
        from transformers.trainer_utils import get_last_checkpoint

        folder = run_folder_of(recipe)
        wanted = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    return {"resume_from_checkpoint": wanted}


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


def _optimizer(recipe: Recipe) -> Fields:
    optim = HF_OPTIMIZERS.get(recipe.optimizer.name)
    return {} if optim is None else {"optim": optim}


def _betas(recipe: Recipe) -> Fields:
    betas = recipe.optimizer.hyperparameters().get("betas")
    return {} if betas is None else dict(zip(("adam_beta1", "adam_beta2"), betas, strict=True))


def _eps(recipe: Recipe) -> Fields:
    eps = recipe.optimizer.hyperparameters().get("eps")
    return {} if eps is None else {"adam_epsilon": eps}


def _momentum(recipe: Recipe) -> Fields:
    momentum = recipe.optimizer.hyperparameters().get("momentum")
    return {} if momentum is None else {"optim_args": f"momentum={momentum}"}


def _layers_are_ours(recipe: Recipe) -> Fields:
    """Turn HF's flags off, which would checkpoint all layers again, and which TRL's configs turn on."""
    return {"activation_checkpointing": False, "gradient_checkpointing": False}


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


def _if_set(name: str, value: Callable[[Recipe], Any]) -> Callable[[Recipe], Fields]:
    return lambda recipe: {} if value(recipe) is None else {name: value(recipe)}


_ATTACH = _InTrainer(carrier="attach")
_PREPARE = _InTrainer(carrier="prepare_model")
_SCRIPT = _InTrainer(carrier="script")
_PLAN = _InTrainer(carrier="plan")
_CALLBACK = _InTrainer(carrier="callback")
_WORDS = _InTrainer(carrier="nothing")

IN_TRAINER: Mapping[str, _InTrainer] = {
    "name": _WORDS,
    "description": _WORDS,
    **{
        f"model.{name}": _PREPARE
        for name in (
            "name_or_path",
            "revision",
            "gguf_file",
            "tokenizer_name_or_path",
            "weights",
            "dtype",
            "quantization",
            "attn_implementation",
        )
    },
    "model.trust_remote_code": _InTrainer(
        carrier="prepare_model", fields=lambda recipe: {"trust_remote_code": recipe.model.trust_remote_code}
    ),
    **{
        f"adapter.{name}": _PREPARE
        for name in (
            "name",
            "r",
            "lora_alpha",
            "lora_dropout",
            "target_modules",
            "use_dora",
            "use_rslora",
        )
    },
    **{
        f"data.{name}": _SCRIPT
        for name in (
            "path",
            "name",
            "revision",
            "data_files",
            "split",
            "sample_by",
            "streaming",
            "max_samples",
            "format",
            "messages_column",
            "prompt_column",
            "input_column",
            "completion_column",
            "system_prompt",
            "shuffle_buffer_size",
            "eval_path",
            "eval_split",
            "eval_size",
        )
    },
    "data.text_column": _InTrainer(
        carrier="script", fields=_if_set("dataset_text_field", lambda recipe: recipe.data.text_column)
    ),
    "data.chat_template": _InTrainer(
        carrier="script", fields=_if_set("chat_template_path", lambda recipe: recipe.data.chat_template)
    ),
    "data.loss_on": _InTrainer(carrier="script", fields=_learnt_tokens),
    "data.max_length": _InTrainer(
        carrier="script", fields=lambda recipe: {"max_length": recipe.data.max_length}
    ),
    "data.packing": _InTrainer(carrier="script", fields=lambda recipe: {"packing": recipe.data.packing}),
    "data.group_by_length": _InTrainer(carrier="arguments", fields=_order_of_rows),
    "data.shuffle": _InTrainer(carrier="arguments", fields=_order_of_rows),
    "data.num_proc": _InTrainer(
        carrier="script", fields=_if_set("dataset_num_proc", lambda recipe: recipe.data.num_proc)
    ),
    "training.output_dir": _InTrainer(
        carrier="arguments", fields=lambda recipe: {"output_dir": str(run_folder_of(recipe))}
    ),
    "training.overwrite_output_dir": _InTrainer(
        carrier="our loop", instead="Delete the folder, or set training.output_dir to another one."
    ),
    "training.per_device_train_batch_size": _InTrainer(carrier="arguments", fields=_rows),
    "training.gradient_accumulation_steps": _InTrainer(carrier="arguments", fields=_rows),
    "training.per_device_eval_batch_size": _InTrainer(carrier="arguments", fields=_evaluation_rows),
    **{
        key: _same_name(key)
        for key in (
            "training.learning_rate",
            "training.lr_scheduler_type",
            "training.lr_scheduler_kwargs",
            "training.warmup_steps",
            "training.num_train_epochs",
            "training.max_steps",
            "training.use_cpu",
            "training.seed",
            "training.full_determinism",
            "training.logging_steps",
            "training.eval_on_start",
            "training.save_total_limit",
            "training.project",
            "training.run_name",
            "training.push_to_hub",
            "training.hub_model_id",
            "training.hub_private_repo",
        )
    },
    "training.max_grad_norm": _InTrainer(
        carrier="arguments", fields=lambda recipe: {"max_grad_norm": recipe.training.max_grad_norm or 0.0}
    ),
    "training.max_skipped_steps": _ATTACH,
    "training.mixed_precision": _InTrainer(
        carrier="arguments",
        fields=lambda recipe: {
            "bf16": recipe.training.mixed_precision == "bf16",
            "fp16": recipe.training.mixed_precision == "fp16",
        },
    ),
    "training.eval_steps": _strategy("eval"),
    "training.save_steps": _strategy("save"),
    "training.resume_from_checkpoint": _InTrainer(carrier="arguments", fields=_resumed),
    "training.report_to": _InTrainer(
        carrier="arguments", fields=lambda recipe: {"report_to": list(recipe.training.report_to)}
    ),
    "optimizer.name": _InTrainer(carrier="attach", fields=_optimizer),
    "optimizer.betas": _InTrainer(carrier="arguments", fields=_betas),
    "optimizer.eps": _InTrainer(carrier="arguments", fields=_eps),
    "optimizer.momentum": _InTrainer(carrier="arguments", fields=_momentum),
    "optimizer.weight_decay": _InTrainer(
        carrier="arguments", fields=lambda recipe: {"weight_decay": recipe.optimizer.weight_decay}
    ),
    "optimizer.state": _ATTACH,
    "optimizer.master": _ATTACH,
    "optimizer.in_backward": _ATTACH,
    "checkpointing.mode": _InTrainer(carrier="attach", fields=_layers_are_ours),
    "checkpointing.every_n_layers": _ATTACH,
    "checkpointing.skip_last_layers": _ATTACH,
    "offload.activations": _InTrainer(
        carrier="attach", fields=lambda recipe: {"activation_offloading": False}
    ),
    "offload.optimizer": _ATTACH,
    "offload.parameters": _ATTACH,
    "offload.resident_layers": _ATTACH,
    "offload.folder": _ATTACH,
    "accumulation.order": _ATTACH,
    "accumulation.dtype": _ATTACH,
    "loss.chunk_tokens": _ATTACH,
    # Trainer's own smoothing would take the labels away before the loss is computed.
    "loss.label_smoothing_factor": _InTrainer(
        carrier="attach", fields=lambda recipe: {"label_smoothing_factor": 0.0}
    ),
    "tiling.mlp": _ATTACH,
    "tiling.head": _ATTACH,
    **{
        f"distributed.{name}": _InTrainer(
            carrier="our loop",
            instead="Leave it out: the script's launcher sets the number of processes. DDP works in a Trainer, FSDP "
            "and DeepSpeed in `lowmem-ft train`.",
        )
        for name in (
            "strategy",
            "num_processes",
            "num_machines",
            "reshard_after_forward",
            "cpu_offload",
            "sync_each_batch",
        )
    },
    "budget.device": _ATTACH,
    "budget.host": _ATTACH,
    "budget.enforce": _ATTACH,
    "budget.preflight": _CALLBACK,
    "budget.retry": _InTrainer(
        carrier="our loop", instead="Leave it out: a step of a Trainer that runs out of memory ends the run."
    ),
    "plan.mode": _PLAN,
    "plan.allow": _PLAN,
    "plan.keep": _PLAN,
}
"""The place of every recipe key; a test compares the keys with ``recipe_keys()``."""
