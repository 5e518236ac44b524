"""Rules across parts about memory: which types, formats and techniques go together. See ``conflicts.py``."""

from __future__ import annotations

from collections.abc import Iterator

from lowmem_ft.models.files.model_files import packed_format_of
from lowmem_ft.models.files.stored_quantization import packing_problem, problems_of_training
from lowmem_ft.optimizers.table import DEFAULT_OPTIMIZER, listed, optimizers_that
from lowmem_ft.recipe.reading.keys import key_with, keys_whose_effect, keys_with, memory_knobs
from lowmem_ft.recipe.rules.rule import reads
from lowmem_ft.recipe.tree import Recipe

WHERE_BFLOAT16_IS = "on a GPU of 2020 (Ampere) or newer"
"""Words for GPUs with bfloat16: a recipe does not know its GPU, and users ask for fp16 where there is no bfloat16."""


@reads(
    *("training.mixed_precision", "model.dtype"),
    *("adapter.name", "adapter.modules_to_save", "adapter.train_new_tokens"),
)
def fp16_needs_float32_weights(recipe: Recipe) -> Iterator[str]:
    """The loss scaler cannot unscale half-precision gradients; gradients of adapters are float32."""
    dtype, trained = recipe.model.dtype, recipe.adapter.trains_model_weights
    if recipe.training.mixed_precision != "fp16":
        return
    if trained and dtype in ("float16", "bfloat16"):
        yield (
            f"training.mixed_precision=fp16 needs model.dtype=float32, got {dtype}. "
            "Set model.dtype=float32 or training.mixed_precision=no."
        )
    elif not trained and dtype == "bfloat16":
        yield (
            f"training.mixed_precision=fp16 needs frozen weights in model.dtype=float16 or float32, got {dtype}. "
            f"Set model.dtype=float16, or training.mixed_precision=bf16 {WHERE_BFLOAT16_IS}."
        )


@reads("model.quantization", "adapter.name")
def quantization_needs_an_adapter(recipe: Recipe) -> Iterator[str]:
    """A weight in 4 or 8 bits has no room for an update."""
    quantization = recipe.model.quantization
    if recipe.model.quantizes and recipe.adapter.name == "none":
        yield (
            f"model.quantization={quantization} freezes the weights and needs adapter.name=lora to train, got none. "
            "Set adapter.name=lora or model.quantization=none."
        )


_KEYS_OF_NEW_TOKENS = ("model.add_tokens", "model.add_special_tokens", "adapter.train_new_tokens")


@reads(*_KEYS_OF_NEW_TOKENS, "adapter.name", "adapter.modules_to_save")
def new_rows_are_trained(recipe: Recipe) -> Iterator[str]:
    """Adapters freeze the embedding and the head; which of these a model has apart is known once it is loaded."""
    if recipe.model.new_tokens and not recipe.adapter.trains_model_weights:
        yield (
            f"model.add_tokens=[{', '.join(recipe.model.new_tokens)}] makes rows of the embedding and head that would "
            "stay untrained with adapter.name=lora. Set adapter.train_new_tokens=true, or "
            "adapter.modules_to_save=[embed_tokens, lm_head], or leave out tokens that the tokenizer has already."
        )


@reads(*_KEYS_OF_NEW_TOKENS, *keys_with("weights on host"))
def rows_alone_are_of_new_tokens_on_the_device(recipe: Recipe) -> Iterator[str]:
    """Rows are trained where they are in their table, and a streamed table is on the host."""
    if not recipe.adapter.train_new_tokens:
        return
    if not recipe.model.new_tokens:
        yield (
            "adapter.train_new_tokens=true trains the rows of new tokens, got model.add_tokens=[]. Name them there or "
            "in model.add_special_tokens, or set adapter.train_new_tokens=false."
        )
    if on_host := key_with(recipe, "weights on host"):
        yield (
            "adapter.train_new_tokens=true needs the embedding and head on the device, got "
            f"{on_host.setting_in(recipe)}. Set {on_host.setting(on_host.default)}, or train them whole with "
            "adapter.modules_to_save=[embed_tokens, lm_head]."
        )


@reads("model.quantization", "model.name_or_path", "model.gguf_file")
def quantization_needs_safetensors(recipe: Recipe) -> Iterator[str]:
    """A GGUF file is quantised in a way of its own, and is unpacked to plain weights."""
    quantization, name = recipe.model.quantization, recipe.model.name_or_path or ""
    if quantization != "none" and recipe.model.is_gguf:
        yield (
            f"model.quantization={quantization} quantises safetensors, got the GGUF file "
            f"{recipe.model.gguf_file or name}. Set model.name_or_path to the model that it was made from, or "
            "model.quantization=none."
        )


@reads(
    *("model.name_or_path", "model.revision", "model.gguf_file", "model.weights", "model.quantization"),
    *("adapter.name", "adapter.use_dora", "distributed.strategy"),
)
def packed_base_is_frozen_and_whole(recipe: Recipe) -> Iterator[str]:
    """A checkpoint in MXFP4 or FP8 is not rounded a second time, not trained itself, and not cut."""
    model, name = recipe.model, recipe.model.name_or_path or ""
    if (stored := packed_format_of(model)) is None:
        return
    if problem := packing_problem(stored, model.quantization, name):
        yield problem
    adapter = recipe.adapter
    yield from problems_of_training(
        stored, name, adapter.name, recipe.distributed.strategy, use_dora=adapter.use_dora
    )


@reads("optimizer.master", "model.dtype", "adapter.name")
def master_needs_bfloat16_weights(recipe: Recipe) -> Iterator[str]:
    """Float32 weights are their own master, and the smaller formats consist of bfloat16's bits."""
    dtype, master = recipe.model.dtype, recipe.optimizer.master
    if master != "fp32" and dtype not in ("bfloat16", "auto"):
        yield (
            f"optimizer.master={master} needs model.dtype=bfloat16, got {dtype}. "
            f"Set optimizer.master=fp32, or model.dtype=bfloat16 {WHERE_BFLOAT16_IS}."
        )
    elif master != "fp32" and recipe.adapter.name != "none":
        yield (
            f"optimizer.master={master} is for trained bfloat16 weights, and adapter.name={recipe.adapter.name} trains "
            "float32 ones. Set optimizer.master=fp32."
        )


@reads("accumulation.fusion", "model.dtype", "adapter.name")
def fused_sums_are_of_16_bit_weights(recipe: Recipe) -> Iterator[str]:
    """Float32 gradients, an adapter's too, are summed as they are: nothing is rounded or converted."""
    dtype, adapter = recipe.model.dtype, recipe.adapter.name
    if not recipe.accumulation.fusion:
        return
    if adapter != "none":
        yield (
            f"accumulation.fusion=true is for trained bfloat16 weights, and adapter.name={adapter} trains float32 "
            "ones. Set accumulation.fusion=false."
        )
    elif dtype not in ("bfloat16", "auto"):
        yield (
            f"accumulation.fusion=true needs model.dtype=bfloat16, got {dtype}. Set accumulation.fusion=false, or "
            f"model.dtype=bfloat16 {WHERE_BFLOAT16_IS}."
        )


@reads("optimizer.in_backward", "training.gradient_accumulation_steps", "accumulation.order")
def in_backward_needs_finished_gradients(recipe: Recipe) -> Iterator[str]:
    """In horizontal order the first micro-batch's gradient is not the step's."""
    steps = recipe.training.gradient_accumulation_steps
    if recipe.optimizer.in_backward and steps > 1 and recipe.accumulation.order == "horizontal":
        yield (
            "optimizer.in_backward needs accumulation.order=vertical when gradient_accumulation_steps > 1, got "
            f"{steps} with horizontal. Set accumulation.order=vertical or optimizer.in_backward=false."
        )


@reads("optimizer.in_backward", "training.mixed_precision", "training.max_grad_norm")
def loss_scaling_needs_two_phases(recipe: Recipe) -> Iterator[str]:
    """An overflow of fp16 is known only at the end of backward; weights updated by then would stay so."""
    training = recipe.training
    if recipe.optimizer.in_backward and training.mixed_precision == "fp16" and training.max_grad_norm is None:
        yield (
            "optimizer.in_backward with training.mixed_precision=fp16 needs training.max_grad_norm, so that updates "
            "wait until the loss scale is known to be right; got null. Set training.max_grad_norm=1.0."
        )


@reads(
    "checkpointing.mode",
    "checkpointing.every_n_layers",
    "checkpointing.skip_last_layers",
    *keys_whose_effect(lambda effect: effect.needs_checkpointed != "no layer"),
)
def offload_needs_checkpointing(recipe: Recipe) -> Iterator[str]:
    """Vertical order, for one, keeps the inputs of all micro-batches in each layer: their activations must not stay."""
    config = recipe.checkpointing
    for key, value, effect in memory_knobs(recipe):
        setting, way_out = key.setting(value), f"Set checkpointing.mode=full or {key.setting(key.default)}."
        if effect.needs_checkpointed == "every layer" and config.checkpointed != "every layer":
            yield (
                f"{setting} needs every layer checkpointed: checkpointing.mode=full or selective with every_n_layers=1 "
                f"and skip_last_layers=0, got {config.mode} with every_n_layers={config.every_n_layers} and "
                f"skip_last_layers={config.skip_last_layers}. {way_out}"
            )
        elif effect.needs_checkpointed == "some layers" and config.checkpointed == "no layer":
            yield f"{setting} needs checkpointing.mode=full or selective, got none. {way_out}"


@reads("offload.optimizer", "optimizer.name")
def host_state_needs_chunks(recipe: Recipe) -> Iterator[str]:
    """The optimizers of bitsandbytes keep their state themselves, and the paged ones have their own way to the host."""
    if recipe.offload.optimizer != "device" and not recipe.optimizer.row.moves_state_by_chunks:
        yield (
            f"offload.optimizer=host needs optimizer.name={listed(optimizers_that('moves_state_by_chunks'), 'or')}, "
            f"got {recipe.optimizer.name}. Set optimizer.name={DEFAULT_OPTIMIZER} (with optimizer.state=8bit) or "
            "offload.optimizer=device."
        )


@reads(
    "offload.parameters",
    "adapter.name",
    "optimizer.in_backward",
    "offload.optimizer",
    "checkpointing.mode",
    "checkpointing.every_n_layers",
    "checkpointing.skip_last_layers",
    "optimizer.name",
)
def streamed_weights_need_their_updates(recipe: Recipe) -> Iterator[str]:
    """Trained weights are on the device only for a moment: gradient, state and update come and go with them."""
    if recipe.offload.parameters == "device" or recipe.adapter.name != "none":
        return
    config, optimizer = recipe.checkpointing, recipe.optimizer
    able = optimizers_that("updates_by_slices")
    wanted = [
        ("optimizer.in_backward=true", "false", optimizer.in_backward),
        ("offload.optimizer=host", recipe.offload.optimizer, recipe.offload.optimizer == "host"),
        (
            "checkpointing.mode=full (or selective), for every layer",
            config.mode,
            config.checkpointed == "every layer",
        ),
        (f"optimizer.name={listed(able, 'or')}", optimizer.name, optimizer.name in able),
    ]
    missing = [(setting, value) for setting, value, is_met in wanted if not is_met]
    if missing:
        yield (
            f"offload.parameters=stream of trained weights needs {' and '.join(setting for setting, _ in missing)}, "
            f"got {' and '.join(value for _, value in missing)}. Set these, adapter.name=lora or "
            "offload.parameters=device."
        )


@reads(*keys_with("no loss scale"), "adapter.name", "training.mixed_precision")
def loss_scale_reaches_every_gradient(recipe: Recipe) -> Iterator[str]:
    """The gradient of a streamed head, for one, is made and consumed before backward brings the loss scale."""
    key = key_with(recipe, "no loss scale")
    if key is not None and recipe.adapter.name == "none" and recipe.training.mixed_precision == "fp16":
        yield (
            f"{key.setting_in(recipe)} of trained weights needs training.mixed_precision=no or bf16, got fp16. "
            f"Set training.mixed_precision=no, adapter.name=lora or {key.setting(key.default)}."
        )


@reads("checkpointing.mode", "checkpointing.every_n_layers", "checkpointing.skip_last_layers")
def layer_choice_needs_checkpointing(recipe: Recipe) -> Iterator[str]:
    """A choice of layers has no effect while no layer is checkpointed."""
    config = recipe.checkpointing
    if config.mode == "none" and (config.every_n_layers != 1 or config.skip_last_layers != 0):
        key = "every_n_layers" if config.every_n_layers != 1 else "skip_last_layers"
        yield (
            f"checkpointing.{key}={getattr(config, key)} needs checkpointing.mode=full, got none. "
            f"Set checkpointing.mode=full or leave checkpointing.{key} out."
        )


@reads("checkpointing.mode", "plan.keep")
def what_is_to_be_chosen_is_not_kept(recipe: Recipe) -> Iterator[str]:
    """Keeping ``auto`` would leave the choice unmade."""
    chosen = ("checkpointing", "checkpointing.mode", "checkpointing.skip_last_layers")
    kept = [key for key in recipe.plan.keep if key in chosen]
    if recipe.checkpointing.mode == "auto" and kept:
        yield (
            f"plan.keep={kept[0]} keeps the recipe's choice, but checkpointing.mode=auto leaves it open. Leave "
            f"{kept[0]} out of plan.keep, or set checkpointing.mode=full."
        )


@reads("checkpointing.mode", "model.attn_implementation")
def selective_needs_fused_attention(recipe: Recipe) -> Iterator[str]:
    """Unfused attention keeps its scores for backward: keeping its output as well would save nothing."""
    attention = recipe.model.attn_implementation
    if recipe.checkpointing.mode == "selective" and attention in ("eager", "flex_attention"):
        yield (
            "checkpointing.mode=selective needs model.attn_implementation=sdpa or flash_attention_2, got "
            f"{attention}. Set model.attn_implementation=auto or checkpointing.mode=full."
        )


@reads("tiling.head", "loss.chunk_tokens")
def head_tiles_need_chunked_loss(recipe: Recipe) -> Iterator[str]:
    """A model's own loss takes all logits at once."""
    if recipe.tiling.head != 1 and recipe.loss.chunk_tokens is None:
        yield (
            f"tiling.head={recipe.tiling.head} needs loss.chunk_tokens, got null. "
            "Set loss.chunk_tokens=1024 or tiling.head=1."
        )


@reads("checkpointing.mlp_activation", "offload.activations")
def recomputed_activations_are_on_the_device(recipe: Recipe) -> Iterator[str]:
    """An activation's own inputs would stay on the device, in addition to its copy on the host."""
    if recipe.checkpointing.mlp_activation != "keep" and recipe.offload.activations == "all":
        yield (
            "checkpointing.mlp_activation=recompute needs what it computes from on the device, got "
            "offload.activations=all. Set checkpointing.mlp_activation=keep, or offload.activations=none."
        )


@reads("tiling.mlp", "model.quantization")
def tiled_mlp_treats_tokens_alone(recipe: Recipe) -> Iterator[str]:
    """LLM.int8 keeps a column of the activations in 16 bits if any of the tokens at hand has an outlier in it."""
    if recipe.tiling.mlp != 1 and recipe.model.quantization == "int8":
        yield (
            f"tiling.mlp={recipe.tiling.mlp} needs MLPs that process each token separately, got "
            "model.quantization=int8, which looks for outliers over all tokens. Set tiling.mlp=1 or "
            "model.quantization=nf4."
        )


@reads("tiling.mlp", "data.max_length", "training.per_device_train_batch_size")
def tiles_hold_tokens(recipe: Recipe) -> Iterator[str]:
    """Beyond one token per piece, more pieces would do nothing; ``data.max_length=null`` depends on the model."""
    if (length := recipe.data.max_length) is None:
        return
    num_tokens = length * recipe.training.per_device_train_batch_size
    if recipe.tiling.mlp > max(1, num_tokens):
        yield (
            f"tiling.mlp={recipe.tiling.mlp} is more pieces than a micro-batch has tokens "
            f"(training.per_device_train_batch_size * data.max_length = {num_tokens}). Set tiling.mlp=8."
        )
