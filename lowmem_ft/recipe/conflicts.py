"""Rules across parts: what one key asks of another. A new rule is a function and a row of ``CONFLICTS``."""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from lowmem_ft.errors import RecipeError, UserError, did_you_mean
from lowmem_ft.recipe.keys import accepts_none, recipe_groups, recipe_keys
from lowmem_ft.recipe.tree import Recipe
from lowmem_ft.units import parse_bytes


def check_recipe(recipe: Recipe) -> None:
    """Refuse a recipe that cannot work, such as one put together in Python.

    Args:
        recipe: any recipe; those from ``load_recipe`` have been checked already.

    Raises:
        RecipeError: if a value is out of its range or two values exclude each other; lists all of it.
    """
    problems = recipe_problems(recipe)
    if problems:
        raise RecipeError(*problems)


def recipe_problems(recipe: Recipe, unreliable: Collection[str] = ()) -> list[str]:
    """What is wrong with a recipe: each part by its own rules, then the rules across parts.

    Args:
        recipe: any recipe.
        unreliable: dotted keys and groups that hold a stand-in for a value nobody could read: rules about
            these are passed over.

    Returns:
        One sentence a problem; empty if the recipe can work.
    """
    problems = _empty_names(recipe)
    for group in recipe_groups():
        own_rules: Callable[[], list[str]] | None = getattr(getattr(recipe, group), "problems", None)
        if own_rules is not None:
            problems += [rule for rule in own_rules() if not _names_any(rule, unreliable)]
    for conflict in CONFLICTS:
        involved = {*conflict.keys, *(key.partition(".")[0] for key in conflict.keys)}
        if involved.isdisjoint(unreliable):
            problem = conflict.rule(recipe)
            problems += [problem] if problem else []
    return problems


def _empty_names(recipe: Recipe) -> list[str]:
    """``data=`` with nothing behind it would be the current folder; only a system prompt may say nothing."""
    return [
        f"{path} is empty. Give it a value, or set {path}=null."
        for path, key in recipe_keys().items()
        if accepts_none(key.type_hint)
        and operator.attrgetter(path)(recipe) == ""
        and path != "data.system_prompt"
    ]


def _names_any(problem: str, unreliable: Collection[str]) -> bool:
    """Whether a group's own rule speaks of a stand-in, as a rule does about an optimizer whose name is misspelt."""
    return any(re.search(rf"\b{re.escape(key)}\b", problem) for key in unreliable if "." in key)


def model_is_named(recipe: Recipe) -> str | None:
    """There is no default model."""
    if recipe.model.name_or_path is None:
        return "model.name_or_path must name a model, got null. Set model=HUB_ID, a folder or a .gguf file."
    return None


def budget_is_readable(recipe: Recipe) -> str | None:
    """Both budgets are sizes."""
    for name in ("device", "host"):
        size = getattr(recipe.budget, name)
        try:
            if size is not None:
                parse_bytes(size)
        except UserError as error:
            return f"budget.{name}: {error}"
    return None


def fp16_needs_float32_weights(recipe: Recipe) -> str | None:
    """The loss scaler cannot unscale half-precision gradients; those of adapters are float32."""
    dtype = recipe.model.dtype
    refused = ("float16", "bfloat16") if recipe.adapter.name == "none" else ("bfloat16",)
    if recipe.training.mixed_precision == "fp16" and dtype in refused:
        return (
            f"training.mixed_precision=fp16 needs model.dtype=float32, got {dtype}. "
            "Set model.dtype=float32 or training.mixed_precision=no."
        )
    return None


def quantization_needs_an_adapter(recipe: Recipe) -> str | None:
    """A weight in 4 or 8 bits has no room for an update."""
    quantization = recipe.model.quantization
    if quantization == "none" or recipe.adapter.name != "none":
        return None
    return (
        f"model.quantization={quantization} freezes the weights and needs adapter.name=lora to train beside them, got "
        "none. Set adapter.name=lora or model.quantization=none."
    )


def quantization_needs_safetensors(recipe: Recipe) -> str | None:
    """A GGUF file is quantised in a way of its own, and is unpacked to plain weights."""
    quantization, name = recipe.model.quantization, recipe.model.name_or_path or ""
    if quantization == "none" or not (recipe.model.gguf_file or name.endswith(".gguf")):
        return None
    return (
        f"model.quantization={quantization} quantises safetensors, got the GGUF file {recipe.model.gguf_file or name}. "
        "Set model.name_or_path to the model it was made from, or model.quantization=none."
    )


def master_needs_bfloat16_weights(recipe: Recipe) -> str | None:
    """Float32 weights are their own master, and the formats below it are made of bfloat16's bits."""
    dtype, master = recipe.model.dtype, recipe.optimizer.master
    if master != "fp32" and dtype not in ("bfloat16", "auto"):
        return (
            f"optimizer.master={master} needs model.dtype=bfloat16, got {dtype}. "
            "Set model.dtype=bfloat16 or optimizer.master=fp32."
        )
    if master != "fp32" and recipe.adapter.name != "none":
        return (
            f"optimizer.master={master} is for trained bfloat16 weights, and adapter.name={recipe.adapter.name} trains "
            "float32 ones. Set optimizer.master=fp32."
        )
    return None


def in_backward_needs_finished_gradients(recipe: Recipe) -> str | None:
    """In horizontal order the first micro-batch's gradient is not the step's."""
    steps = recipe.training.gradient_accumulation_steps
    if recipe.optimizer.in_backward and steps > 1 and recipe.accumulation.order == "horizontal":
        return (
            "optimizer.in_backward needs accumulation.order=vertical when gradient_accumulation_steps > 1, got "
            f"{steps} with horizontal. Set accumulation.order=vertical or optimizer.in_backward=false."
        )
    return None


def loss_scaling_needs_two_phases(recipe: Recipe) -> str | None:
    """An overflow of fp16 is known at the end of backward; what was updated by then would stay so."""
    training = recipe.training
    if recipe.optimizer.in_backward and training.mixed_precision == "fp16" and training.max_grad_norm is None:
        return (
            "optimizer.in_backward with training.mixed_precision=fp16 needs training.max_grad_norm, so that weights "
            "wait until the loss scale is known to fit; got null. Set training.max_grad_norm=1.0."
        )
    return None


def vertical_needs_checkpointing(recipe: Recipe) -> str | None:
    """The inputs of all micro-batches wait in each layer; what a layer computes from them must not."""
    config = recipe.checkpointing
    all_layers = config.mode != "none" and config.every_n_layers == 1 and config.skip_last_layers == 0
    if recipe.accumulation.order == "horizontal" or all_layers:
        return None
    return (
        "accumulation.order=vertical needs every layer checkpointed: checkpointing.mode=full or selective with "
        f"every_n_layers=1 and skip_last_layers=0, got {config.mode} with every_n_layers={config.every_n_layers} and "
        f"skip_last_layers={config.skip_last_layers}. Set checkpointing.mode=full or accumulation.order=horizontal."
    )


def host_state_needs_chunks(recipe: Recipe) -> str | None:
    """The optimizers of bitsandbytes keep their state themselves, and the paged ones have their own way to the host."""
    name = recipe.optimizer.name
    if recipe.offload.optimizer == "device" or name in ("adamw", "sgd", "lion", "adafactor"):
        return None
    return (
        f"offload.optimizer=host needs optimizer.name=adamw, sgd, lion or adafactor, got {name}. "
        "Set optimizer.name=adamw (with optimizer.state=8bit) or offload.optimizer=device."
    )


def streamed_weights_need_their_updates(recipe: Recipe) -> str | None:
    """Trained weights are on the device for a moment only: gradient, state and update come and go with them."""
    if recipe.offload.parameters == "device" or recipe.adapter.name != "none":
        return None
    config, optimizer = recipe.checkpointing, recipe.optimizer
    all_layers = config.mode != "none" and config.every_n_layers == 1 and config.skip_last_layers == 0
    wanted = [
        ("optimizer.in_backward=true", "false", optimizer.in_backward),
        ("offload.optimizer=host", recipe.offload.optimizer, recipe.offload.optimizer == "host"),
        ("checkpointing.mode=full (or selective), for every layer", config.mode, all_layers),
        ("optimizer.name=adamw, sgd or lion", optimizer.name, optimizer.name in ("adamw", "sgd", "lion")),
    ]
    missing = [(setting, value) for setting, value, is_met in wanted if not is_met]
    if not missing:
        return None
    return (
        f"offload.parameters=stream of trained weights needs {' and '.join(setting for setting, _ in missing)}, got "
        f"{' and '.join(value for _, value in missing)}. Set that, adapter.name=lora or offload.parameters=device."
    )


def streamed_head_has_no_loss_scale(recipe: Recipe) -> str | None:
    """The gradient of a streamed head is made and taken before backward, which brings the scale, begins."""
    if (
        recipe.offload.parameters == "device"
        or recipe.adapter.name != "none"
        or recipe.training.mixed_precision != "fp16"
    ):
        return None
    return (
        "offload.parameters=stream of trained weights needs training.mixed_precision=no or bf16, got fp16. "
        "Set training.mixed_precision=no, adapter.name=lora or offload.parameters=device."
    )


def streaming_needs_max_steps(recipe: Recipe) -> str | None:
    """A stream has no length, and a schedule needs the number of steps."""
    if recipe.data.streaming and recipe.training.max_steps == -1:
        return (
            "data.streaming=true needs training.max_steps, as the length of a stream is unknown; got -1. "
            "Set training.max_steps or data.streaming=false."
        )
    return None


def evaluation_needs_data(recipe: Recipe) -> str | None:
    """An evaluation that was asked for is never skipped."""
    data, training = recipe.data, recipe.training
    has_data = any(source is not None for source in (data.eval_path, data.eval_split, data.eval_size))
    if has_data or (training.eval_steps is None and not training.eval_on_start):
        return None
    asked = "training.eval_on_start" if training.eval_steps is None else "training.eval_steps"
    return (
        f"{asked} needs held-out data, but data.eval_path, data.eval_split and data.eval_size are null. "
        f"Set one of them, such as data.eval_size=0.05, or unset {asked}."
    )


def hub_settings_need_push(recipe: Recipe) -> str | None:
    """A hub name without an upload is a forgotten switch."""
    training = recipe.training
    if training.push_to_hub or (training.hub_model_id is None and training.hub_private_repo is None):
        return None
    key = "hub_model_id" if training.hub_model_id is not None else "hub_private_repo"
    return (
        f"training.{key}={getattr(training, key)} needs training.push_to_hub=true, got false. "
        f"Set training.push_to_hub=true or training.{key}=null."
    )


def resume_needs_the_old_run(recipe: Recipe) -> str | None:
    """Replacing a run folder deletes the checkpoints in it."""
    training = recipe.training
    if training.resume_from_checkpoint == "auto" and training.overwrite_output_dir:
        return (
            "training.resume_from_checkpoint=auto continues the run that training.overwrite_output_dir=true "
            "deletes. Unset one of the two."
        )
    return None


def layer_choice_needs_checkpointing(recipe: Recipe) -> str | None:
    """A choice of layers says nothing while no layer is checkpointed."""
    config = recipe.checkpointing
    if config.mode != "none" or (config.every_n_layers == 1 and config.skip_last_layers == 0):
        return None
    key = "every_n_layers" if config.every_n_layers != 1 else "skip_last_layers"
    return (
        f"checkpointing.{key}={getattr(config, key)} needs checkpointing.mode=full, got none. "
        f"Set checkpointing.mode=full or leave checkpointing.{key} out."
    )


def selective_needs_fused_attention(recipe: Recipe) -> str | None:
    """Unfused attention keeps its scores for backward: to keep its output besides would spare nothing."""
    attention = recipe.model.attn_implementation
    if recipe.checkpointing.mode != "selective" or attention not in ("eager", "flex_attention"):
        return None
    return (
        "checkpointing.mode=selective needs model.attn_implementation=sdpa or flash_attention_2, got "
        f"{attention}. Set model.attn_implementation=auto or checkpointing.mode=full."
    )


def offloaded_inputs_need_checkpointing(recipe: Recipe) -> str | None:
    """The inputs that wait are those which checkpointed layers keep."""
    if recipe.offload.activations != "inputs" or recipe.checkpointing.mode != "none":
        return None
    return (
        "offload.activations=inputs needs checkpointing.mode=full or selective, got none. "
        "Set checkpointing.mode=full or offload.activations=none."
    )


def head_tiles_need_chunked_loss(recipe: Recipe) -> str | None:
    """A model's own loss takes all logits at once."""
    if recipe.tiling.head == 1 or recipe.loss.chunk_tokens is not None:
        return None
    return (
        f"tiling.head={recipe.tiling.head} needs loss.chunk_tokens, got null. "
        "Set loss.chunk_tokens=1024 or tiling.head=1."
    )


def tiled_mlp_treats_tokens_alone(recipe: Recipe) -> str | None:
    """LLM.int8 keeps a column of the activations in 16 bits if any of the tokens at hand has an outlier in it."""
    if recipe.tiling.mlp == 1 or recipe.model.quantization != "int8":
        return None
    return (
        f"tiling.mlp={recipe.tiling.mlp} needs MLPs that treat each token by itself, got model.quantization=int8, "
        "which looks for outliers over all tokens. Set tiling.mlp=1 or model.quantization=nf4."
    )


def constant_schedule_has_no_warmup(recipe: Recipe) -> str | None:
    """The schedule ``constant`` would ignore a warmup."""
    warmup = recipe.training.warmup_steps
    if recipe.training.lr_scheduler_type == "constant" and warmup > 0:
        return (
            f"training.lr_scheduler_type=constant has no warmup, got training.warmup_steps={warmup:g}. "
            "Set training.lr_scheduler_type=constant_with_warmup or training.warmup_steps=0."
        )
    return None


SCHEDULES_THAT_NEED_ARGUMENTS = ("cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay")


def schedule_takes_its_arguments(recipe: Recipe) -> str | None:
    """The schedule is built once on a stand-in, so that transformers itself judges its arguments."""
    name = recipe.training.lr_scheduler_type
    arguments: dict[str, Any] = recipe.training.lr_scheduler_kwargs or {}
    if not arguments and name not in SCHEDULES_THAT_NEED_ARGUMENTS:
        return None

    # Here, because it imports peft and bitsandbytes where they are installed: two seconds that few recipes need.
    import torch
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, get_scheduler
    from transformers.trainer_utils import SchedulerType

    ours = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
    known = [*inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(name)]).parameters]
    known = [parameter for parameter in known if parameter not in ours]
    where = f"training.lr_scheduler_kwargs of training.lr_scheduler_type={name}"
    for unknown in arguments.keys() - known:
        takes = f"it takes {', '.join(known)}" if known else "it takes none"
        return f"{where} has no `{unknown}`: {takes}.{did_you_mean(str(unknown), known)}"
    try:
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        get_scheduler(name, optimizer, 0, 1, arguments)
    except (TypeError, ValueError) as error:
        return f"{where} are refused by transformers: {error}. It takes {', '.join(known)}; got {arguments}."
    return None


@dataclass(frozen=True)
class Conflict:
    """A rule over a recipe, and the keys it reads: it returns what is wrong, or None."""

    rule: Callable[[Recipe], str | None]
    keys: tuple[str, ...]


CONFLICTS: tuple[Conflict, ...] = (
    Conflict(model_is_named, ("model.name_or_path",)),
    Conflict(budget_is_readable, ("budget.device", "budget.host")),
    Conflict(fp16_needs_float32_weights, ("training.mixed_precision", "model.dtype", "adapter.name")),
    Conflict(quantization_needs_an_adapter, ("model.quantization", "adapter.name")),
    Conflict(quantization_needs_safetensors, ("model.quantization", "model.name_or_path", "model.gguf_file")),
    Conflict(master_needs_bfloat16_weights, ("optimizer.master", "model.dtype", "adapter.name")),
    Conflict(
        in_backward_needs_finished_gradients,
        ("optimizer.in_backward", "training.gradient_accumulation_steps", "accumulation.order"),
    ),
    Conflict(
        loss_scaling_needs_two_phases,
        ("optimizer.in_backward", "training.mixed_precision", "training.max_grad_norm"),
    ),
    Conflict(
        vertical_needs_checkpointing,
        (
            "accumulation.order",
            "checkpointing.mode",
            "checkpointing.every_n_layers",
            "checkpointing.skip_last_layers",
        ),
    ),
    Conflict(host_state_needs_chunks, ("offload.optimizer", "optimizer.name")),
    Conflict(
        streamed_weights_need_their_updates,
        (
            "offload.parameters",
            "adapter.name",
            "optimizer.in_backward",
            "offload.optimizer",
            "checkpointing.mode",
            "checkpointing.every_n_layers",
            "checkpointing.skip_last_layers",
            "optimizer.name",
        ),
    ),
    Conflict(
        streamed_head_has_no_loss_scale, ("offload.parameters", "adapter.name", "training.mixed_precision")
    ),
    Conflict(streaming_needs_max_steps, ("data.streaming", "training.max_steps")),
    Conflict(
        evaluation_needs_data,
        (
            "training.eval_steps",
            "training.eval_on_start",
            "data.eval_path",
            "data.eval_split",
            "data.eval_size",
        ),
    ),
    Conflict(
        hub_settings_need_push, ("training.push_to_hub", "training.hub_model_id", "training.hub_private_repo")
    ),
    Conflict(resume_needs_the_old_run, ("training.resume_from_checkpoint", "training.overwrite_output_dir")),
    Conflict(
        layer_choice_needs_checkpointing,
        ("checkpointing.mode", "checkpointing.every_n_layers", "checkpointing.skip_last_layers"),
    ),
    Conflict(selective_needs_fused_attention, ("checkpointing.mode", "model.attn_implementation")),
    Conflict(offloaded_inputs_need_checkpointing, ("offload.activations", "checkpointing.mode")),
    Conflict(head_tiles_need_chunked_loss, ("tiling.head", "loss.chunk_tokens")),
    Conflict(tiled_mlp_treats_tokens_alone, ("tiling.mlp", "model.quantization")),
    Conflict(constant_schedule_has_no_warmup, ("training.lr_scheduler_type", "training.warmup_steps")),
    Conflict(
        schedule_takes_its_arguments,
        ("training.lr_scheduler_type", "training.lr_scheduler_kwargs"),
    ),
)
