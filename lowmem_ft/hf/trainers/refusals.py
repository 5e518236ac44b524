"""Settings of a trainer that do not work with our techniques, or that attaching would silently undo: each by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env
from transformers import DataCollatorWithFlattening

from lowmem_ft.foundation.devices import of_tensors
from lowmem_ft.foundation.tensors.finiteness import some_of
from lowmem_ft.foundation.tensors.local_shards import is_sharded
from lowmem_ft.hf.trainers.overridden_methods import problems_with_overrides
from lowmem_ft.hf.trainers.sharded_refusals import problems_of_fsdp
from lowmem_ft.optimizers import parameter_groups
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.reading.keys import key_with
from lowmem_ft.recipe.rules.engine_rules import problems_with_processes
from lowmem_ft.recipe.trainers.shared_settings import BY_HF_NAME, names_optimizer, optim_args
from lowmem_ft.recipe.trainers.trainer_kinds import Kind
from lowmem_ft.techniques.modules.model_parts import ModelParts, base_model


def problems_with_trainer(trainer: Any, recipe: Recipe, kind: Kind) -> Iterator[str]:
    """Yield every reason why a recipe cannot be attached to a trainer: rule, value and way out.

    Args:
        trainer: the trainer as its constructor left it.
        recipe: the recipe with the trainer's values; see ``agreement.py``.
        kind: the kind of the trainer.
    """
    yield from problems_of_whole_runs(recipe)
    yield from _launch(trainer, recipe, kind)
    yield from _model(trainer, recipe)
    yield from _optimizer(trainer, recipe)
    yield from _changed_model(trainer.args, recipe)
    yield from _batches(trainer, recipe)
    yield from _towers(trainer.model, recipe)
    yield from problems_with_overrides(trainer, recipe, kind)
    if recipe.loss.chunk_tokens is not None:
        yield from _loss(trainer, recipe)
    if kind == "SFTTrainer":
        yield from _sft(trainer, recipe)
    yield from _offloading(trainer.args, recipe, kind)


def _launch(trainer: Any, recipe: Recipe, kind: Kind) -> Iterator[str]:
    accelerator, args = trainer.accelerator, trainer.args
    for name in _sharding(trainer):
        yield (
            f"hf.attach() works in one process, data-parallel (DDP) or with FSDP 2, got {name}. Leave it out, and "
            "launch with `accelerate launch --num_processes N` or torchrun."
        )
    yield from problems_of_fsdp(trainer, recipe, kind, _asks_for("FSDP"))
    if args.n_gpu > 1:
        yield (
            f"hf.attach() works with one GPU a process, and this one sees {args.n_gpu}: Trainer would copy the model "
            "to each GPU in every step (DataParallel). Launch with torchrun, or set CUDA_VISIBLE_DEVICES=0."
        )
    if accelerator.num_processes > 1 and not args.average_tokens_across_devices:
        yield (
            "TrainingArguments.average_tokens_across_devices=False makes the loss a mean of the processes' means, in "
            f"which a token of a process with few tokens weighs more; got {accelerator.num_processes} processes. Set "
            "it to True."
        )
    yield from problems_with_processes(recipe, accelerator.num_processes)
    if accelerator.mixed_precision not in ("no", "bf16", "fp16"):
        yield (
            f"hf.attach() trains with mixed precision no, bf16 or fp16, got {accelerator.mixed_precision}. Set "
            "bf16=True."
        )


_ASKED_BY_LAUNCHER = {
    "DEEPSPEED": "DeepSpeed",
    "MEGATRON_LM": "Megatron-LM",
    "PARALLELISM_CONFIG": "a parallelism config",
}
"""Variables that ``accelerate launch`` sets. On a CPU, Accelerate silently trains with DDP all the same."""


def _asks_for(engine: str) -> bool:
    return parse_flag_from_env(f"ACCELERATE_USE_{engine}")


def _sharding(trainer: Any) -> Iterator[str]:
    """Yield the names under which weights or a batch are spread over processes in another way than by DDP or FSDP."""
    accelerator, args, model = trainer.accelerator, trainer.args, trainer.model
    asked = [name for engine, name in _ASKED_BY_LAUNCHER.items() if _asks_for(engine)]
    if trainer.is_deepspeed_enabled and "DeepSpeed" not in asked:
        yield "DeepSpeed"
    yield from asked
    if args.parallelism_config is not None:
        yield "TrainingArguments.parallelism_config"
    sharded = getattr(model, "is_distributed_loading_by_transformers", False)
    if sharded or (any(map(is_sharded, model.parameters())) and not _is_prepared(model)):
        yield "a model whose weights are sharded as they are loaded (tp_plan, device_mesh or distributed_config)"
    kind = accelerator.distributed_type.value
    if kind not in ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED"):
        yield kind


def _model(trainer: Any, recipe: Recipe) -> Iterator[str]:
    model, device = trainer.model, trainer.args.device
    if trainer.model_init is not None:
        yield (
            "hf.attach() changes the trainer's model, and model_init creates another one when training begins. Pass "
            "model= instead."
        )
    devices, on_host = getattr(model, "hf_device_map", None) or {}, key_with(recipe, "weights on host")
    if len(set(map(str, devices.values()))) > 1:
        yield (
            "hf.attach() needs the model on one device, got a device_map over "
            f"{len(set(map(str, devices.values())))}. "
            "Load it without device_map."
        )
    elif on_host is None:
        away = {parameter.device.type for parameter in model.parameters()} - {of_tensors(device).type}
        if away and not recipe.distributed.plan().shards_rows:  # which moves each process's part there
            yield (
                f"hf.attach() needs the model on {device}, where it is trained; parts of it are on "
                f"{' and '.join(sorted(away))}. Leave device_map and place_model_on_device out."
            )
    elif any(parameter.device.type != "cpu" for parameter in model.parameters()):
        yield (
            f"{on_host.setting_in(recipe)} needs the weights on the host, and the trainer has moved them to "
            f"{device}. Pass model=hf.prepare_model(model, recipe) to its constructor."
        )


def _optimizer(trainer: Any, recipe: Recipe) -> Iterator[str]:
    args, name = trainer.args, recipe.optimizer.name
    if trainer.optimizer is not None:
        yield (
            f"The recipe's optimizer is {name}, but another was passed to the trainer: "
            f"{type(trainer.optimizer).__name__}. Leave optimizers= out."
        )
    elif trainer.lr_scheduler is not None:
        yield (
            "The trainer was given a schedule for another optimizer. Leave optimizers= out, and set lr_scheduler_type."
        )
    if trainer.optimizer_cls_and_kwargs is not None:
        yield f"The recipe has the optimizer, {name}. Leave optimizer_cls_and_kwargs= out."
    optim = getattr(args.optim, "value", args.optim)
    default = next(spec.default for spec in dataclasses.fields(args) if spec.name == "optim")
    if optim != getattr(default, "value", default) and BY_HF_NAME.get(optim) != name:
        ours = BY_HF_NAME.get(optim)
        way_out = (
            f"set optimizer.name={ours} in the recipe" if ours else "lowmem_ft does not have that optimizer"
        )
        yield (
            f"TrainingArguments.optim={optim} is not the recipe's optimizer.name={name}. Leave optim out, or "
            f"{way_out}."
        )
    taken = (
        {"momentum"} & recipe.optimizer.row.hyperparameters.keys() if names_optimizer(args, name) else set()
    )
    for field, is_read in (
        ("optim_args", set(optim_args(args)) <= taken),
        ("optim_target_modules", not args.optim_target_modules),
    ):
        if not is_read:
            yield (
                f"TrainingArguments.{field} is for an optimizer that the trainer creates, but the recipe has "
                f"optimizer.name={name}; got {getattr(args, field)!r}. Leave it out, or use the recipe's optimizer.* "
                "keys."
            )
    if recipe.optimizer.weight_decay and (others := _decayed_otherwise(trainer)):
        yield (
            "A recipe's weight_decay does not apply to biases and norms, and get_decay_parameter_names of "
            f"{type(trainer).__name__} chooses otherwise for {some_of(others)}. Remove the override, or set "
            "weight_decay=0."
        )


def _decayed_otherwise(trainer: Any) -> list[str]:
    """Return trained parameters that only one of the two, trainer and recipe, would decay."""
    model, decayed = trainer.model, set(trainer.get_decay_parameter_names(trainer.model))
    groups = parameter_groups(model, weight_decay=1.0)
    ours = {id(weight) for group in groups if group["weight_decay"] for weight in group["params"]}
    return [
        name
        for name, weight in model.named_parameters()
        if weight.requires_grad and (name in decayed) != (id(weight) in ours)
    ]


_STAY_OFF = {
    "torch_compile": "would compile code that our techniques change at run time. Set it to False.",
    "auto_find_batch_size": "restarts training within a step that ran out of memory, with weights and optimizer "
    "half updated. Set it to False; `lowmem-ft plan` finds settings that fit.",
    **dict.fromkeys(
        ("bf16_full_eval", "fp16_full_eval"),
        "rounds the weights permanently for an evaluation, and leaves the optimizer's copy unchanged. Set it to False.",
    ),
}
"""Arguments by which a trainer changes the model, or its size, after training has begun, and why none of them works."""


def _changed_model(args: Any, recipe: Recipe) -> Iterator[str]:
    for field, why in _STAY_OFF.items():
        if getattr(args, field):
            yield f"TrainingArguments.{field} {why}"
    if args.neftune_noise_alpha is not None and (on_host := key_with(recipe, "weights on host")):
        yield (
            "TrainingArguments.neftune_noise_alpha adds noise after an embedding on the device, and "
            f"{on_host.setting_in(recipe)} keeps it on the host. Leave one of the two out."
        )


def _batches(trainer: Any, recipe: Recipe) -> Iterator[str]:
    flattens = getattr(trainer, "padding_free", False) or isinstance(
        trainer.data_collator, DataCollatorWithFlattening
    )
    if flattens and (whole := key_with(recipe, "whole window at once")):
        yield (
            f"{whole.setting_in(recipe)} processes a batch a few rows at a time, but padding-free batches are one "
            f"row. Set packing_strategy=wrapped or padding_free=False, or {whole.setting(whole.default)}."
        )


def _towers(model: Any, recipe: Recipe) -> Iterator[str]:
    stacks, name = ModelParts(model).stacks, type(base_model(model)).__name__
    if len(stacks) > 1 and (whole := key_with(recipe, "whole window at once")):
        yield (
            f"{whole.setting_in(recipe)} processes a batch a few rows at a time, but the pictures or sound of all rows "
            f"are one tensor to {name}. Set {whole.setting(whole.default)}."
        )
    if len(stacks) > 1 and (on_host := key_with(recipe, "weights on host")):
        yield (
            f"{on_host.setting_in(recipe)} streams one stack of layers, and {name} has {len(stacks)}: "
            f"{', '.join(stacks)}. Set {on_host.setting(on_host.default)}."
        )


def _loss(trainer: Any, recipe: Recipe) -> Iterator[str]:
    chunks = f"loss.chunk_tokens={recipe.loss.chunk_tokens}"
    if trainer.label_smoother is not None:
        factor = trainer.args.label_smoothing_factor
        yield (
            f"TrainingArguments.label_smoothing_factor={factor:g} removes the labels from the model's inputs, so "
            f"{chunks} would do nothing. Set loss.label_smoothing_factor={factor:g} in the recipe and 0 here, or "
            "loss.chunk_tokens=null."
        )
    if trainer.compute_loss_func is not None:
        yield (
            f"compute_loss_func removes the labels from the model's inputs, and needs all logits, which {chunks} "
            "never has. Leave it out, or set loss.chunk_tokens=null."
        )


def _sft(trainer: Any, recipe: Recipe) -> Iterator[str]:
    args, chunks = trainer.args, recipe.loss.chunk_tokens
    if chunks is not None and args.loss_type not in ("nll", "chunked_nll"):  # two names of one loss
        yield (
            f"loss.chunk_tokens={chunks} is the mean negative log-likelihood, got "
            f"SFTConfig.loss_type={args.loss_type}. "
            "Set loss_type=nll, or loss.chunk_tokens=null."
        )
    if chunks is not None and trainer.aux_loss_enabled and args.gradient_accumulation_steps > 1:
        yield (
            f"loss.chunk_tokens={chunks} adds the full routers' loss of each micro-batch, but SFTTrainer adds a share "
            f"of {args.gradient_accumulation_steps}. Set loss.chunk_tokens=null, or router_aux_loss_coef=0."
        )
    if chunks is None and (on_host := key_with(recipe, "weights on host")):
        yield (
            f"{on_host.setting_in(recipe)} under SFTTrainer needs loss.chunk_tokens, got null: TRL's own head reads "
            "the weights of lm_head itself, but they are on the host. Set loss.chunk_tokens=1024."
        )


def _offloading(args: Any, recipe: Recipe, kind: Kind) -> Iterator[str]:
    offloading = key_with(recipe, "activations on host")
    if offloading and getattr(args, "activation_offloading", False):
        yield (
            f"{offloading.setting_in(recipe)} and {type(args).__name__}.activation_offloading both copy what "
            "backward needs to the host. Set activation_offloading=False."
        )
    if offloading and offloading.value_in(recipe) == "all" and kind == "DistillationTrainer":
        yield (
            f"{offloading.setting_in(recipe)} copies what the model's forward saves, and DistillationTrainer calls the "
            f"layers past that forward. Set {offloading.setting('inputs')}."
        )


def already_attached(trainer: Any) -> Iterator[str]:
    """Yield the reason why a recipe cannot be attached to this trainer, or its model, again.

    Args:
        trainer: any of the known kinds.
    """
    model = trainer.model
    if trainer.is_in_train or trainer.model_wrapped is not model or _is_prepared(model):
        yield (
            "hf.attach() must be called before the trainer's first train() or evaluate(), but Accelerate has already "
            "prepared this model. Create a new trainer, and attach to it right away."
        )


def _is_prepared(model: torch.nn.Module) -> bool:
    return getattr(model, "_is_accelerate_prepared", False)


def problems_of_whole_runs(recipe: Recipe) -> Iterator[str]:
    """Yield the keys of a recipe that only runs of lowmem-ft follow, as a trainer saves its model and tokenizer."""
    if whole := recipe.adapter.modules_to_save:
        yield (
            f"adapter.modules_to_save is for runs of lowmem-ft, got [{', '.join(whole)}]. Leave it out: a trainer "
            "trains what its peft.LoraConfig names in modules_to_save."
        )
    if recipe.adapter.train_new_tokens:
        yield (
            "adapter.train_new_tokens is for runs of lowmem-ft, got true. Leave it out: a trainer trains the rows that "
            "its peft.LoraConfig names in trainable_token_indices."
        )
    if new := recipe.model.new_tokens:
        yield (
            f"model.add_tokens is for runs of lowmem-ft, got [{', '.join(new)}]. Add them to the trainer's tokenizer, "
            "and call resize_token_embeddings(len(tokenizer)) on its model."
        )
