"""Settings of a trainer's FSDP that do not work with our techniques: each by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.distributed.fsdp import CPUOffloadPolicy

from lowmem_ft.foundation.tensors.finiteness import some_of
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.trainers.trainer_kinds import Kind

_SHARDED_KINDS: tuple[Kind, ...] = ("Trainer", "SFTTrainer", "DPOTrainer")


def problems_of_fsdp(trainer: Any, recipe: Recipe, kind: Kind, asked_by_launch: bool) -> Iterator[str]:
    """Yield the problems with the FSDP that a script or its launch asks for; none if neither does.

    Args:
        trainer: the trainer as its constructor left it.
        recipe: the recipe with the trainer's values.
        kind: the kind of the trainer.
        asked_by_launch: whether ``accelerate launch`` asks for FSDP.
    """
    accelerator = trainer.accelerator
    if not (asked_by_launch or trainer.is_fsdp_enabled or trainer.args.fsdp):
        return
    if accelerator.distributed_type.value != "FSDP":
        yield (
            "FSDP was asked for, but Accelerate shards on GPUs alone, and here leaves a whole model in each process "
            f"({accelerator.distributed_type.value}). Leave FSDP out, or launch on GPUs."
        )
    elif accelerator.state.fsdp_plugin.fsdp_version != 2:
        yield (
            'hf.attach() works with FSDP 2, got FSDP 1. Set fsdp_config={"version": 2} in TrainingArguments, or '
            "fsdp_version: 2 in the file of `accelerate config`."
        )
    else:
        yield from _of_kind(kind)
        yield from _of_plugin(accelerator.state.fsdp_plugin)
        yield from _of_precision(accelerator.mixed_precision)
        yield from _of_quantised(trainer.model)


def problems_of_plan(trainer: Any) -> Iterator[str]:
    """Yield the reason why a trainer's settings cannot be planned: its processes share the model."""
    if trainer.is_fsdp_enabled:
        yield (
            "plan='auto' plans for processes that each hold the whole model, and this trainer was launched with FSDP. "
            "Plan with `lowmem-ft plan ... distributed.strategy=fsdp2 --write my.yaml`, and attach my.yaml."
        )


def _of_kind(kind: Kind) -> Iterator[str]:
    if kind not in _SHARDED_KINDS:
        yield (
            f"hf.attach() works with FSDP 2 in {', '.join(_SHARDED_KINDS)}, got {kind}. Launch it without FSDP, which "
            "is DDP."
        )


def _of_plugin(plugin: Any) -> Iterator[str]:
    if plugin.activation_checkpointing:
        yield (
            "fsdp_config's activation_checkpointing puts wrappers around the layers that a recipe's techniques have "
            "changed. Set it to False, and checkpointing.mode=full in the recipe."
        )
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        yield (
            "fsdp_config's cpu_offload has not been shown to work with hf.attach(). Set it to False, and "
            "offload.optimizer=host in the recipe."
        )
    if plugin.ignored_modules is not None:
        yield (
            "FSDP's ignored_modules stay whole, and nothing sums their gradients over the processes. Leave "
            "ignored_modules out."
        )


def _of_precision(mixed_precision: str) -> Iterator[str]:
    if mixed_precision == "fp16":
        yield (
            "fp16=True has not been shown to work with FSDP 2: each process would have a loss scale of its own. Set "
            "bf16=True."
        )


def _of_quantised(model: Any) -> Iterator[str]:
    packed = [
        name
        for name, parameter in model.named_parameters()
        if type(parameter).__name__ in ("Params4bit", "Int8Params") and not parameter.is_floating_point()
    ]
    if packed:
        yield (
            f"FSDP 2 shards floating-point tensors, and {some_of(packed)} are packed as integers, which would stay "
            "whole in each process. Load the model with bnb_4bit_quant_storage of its dtype, such as torch.bfloat16; "
            "hf.prepare_model() packs as integers."
        )
