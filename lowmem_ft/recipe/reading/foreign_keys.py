"""Keys of other toolkits, and what a recipe says instead.

One table answers a foreign key in a recipe or on the command line, and is printed in ``docs/coming_from.md``. The names
are those of the toolkits' example configs and config classes of November 2026 (transformers 5.23, TRL 1.16), and older
ones that people still have in their files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

KEYS_OF = {
    "axolotl": """
        activation_checkpointing activation_offloading adam_beta1 adam_beta2 adam_epsilon adapter
        auto_find_batch_size auto_resume_from_checkpoints base_model batch_size bf16
        context_parallel_size cosine_min_lr_ratio cut_cross_entropy dataloader_drop_last
        dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor dataset_num_proc
        dataset_prepared_path dataset_processes datasets ddp_bucket_cap_mb ddp_find_unused_parameters
        ddp_timeout deepspeed device device_map dp_shard_size eager_attention embedding_lr eos_token
        eot_tokens eval_batch_size eval_max_new_tokens eval_sample_packing eval_strategy eval_table_size
        evals_per_epoch evaluation_strategy flash_attention flex_attention fp16 fp8 fsdp fsdp_config
        fsdp_version gpu_memory_utilization gradient_checkpointing gradient_checkpointing_kwargs
        hub_strategy liger_fused_linear_cross_entropy liger_glu_activation liger_layer_norm
        liger_rms_norm liger_rms_norm_gated liger_rope load_in_4bit load_in_8bit local_rank loftq_config
        lora_fan_in_fan_out lora_mlp_kernel lora_model_dir lora_modules_to_save lora_o_kernel
        lora_qkv_kernel lora_r lora_target_linear lora_target_modules lora_target_parameters
        loraplus_lr_embedding loraplus_lr_ratio loss_type loss_watchdog_patience loss_watchdog_threshold
        lr lr_scheduler max_packed_sequence_len micro_batch_size model_type neftune_noise_alpha
        num_epochs optimizer pad_to_multiple_of pad_to_sequence_len pad_token peft_use_dora
        peft_use_rslora processor_type push_dataset_to_hub qat quantize_moe_experts
        remove_unused_columns revision_of_model rl roles_to_train rope_scaling sample_packing
        save_only_model save_strategy saves_per_epoch sdp_attention sequence_len
        sequence_parallel_degree skip_prepare_dataset special_tokens test_datasets tf32 tokenizer_config
        tokenizer_type tokens torch_compile torch_compile_backend torch_compile_mode torch_dtype
        trackio_project_name trackio_run_name trackio_space_id train_on_eos train_on_inputs
        type_of_model unfrozen_parameters use_kernels val_set_size wandb_entity wandb_log_model
        wandb_mode wandb_name wandb_project wandb_run_id wandb_watch warmup_ratio xformers_attention
    """,
    "LLaMA-Factory": """
        adam_beta1 adam_beta2 adapter_name_or_path additional_target batch_size bf16
        context_parallel_size cp_size cutoff_len dataloader_num_workers dataset dataset_dir ddp_timeout
        deepspeed device_map disable_gradient_checkpointing dist_config do_train double_quantization
        enable_liger_kernel eval_dataset export_device export_dir export_legacy_format export_size
        finetuning_type flash_attn fp8 freeze_multi_modal_projector freeze_trainable_layers
        freeze_trainable_modules freeze_vision_tower fsdp fsdp_config fsdp_version
        gradient_checkpointing gradient_checkpointing_kwargs image_max_pixels infer_backend
        interleave_probs lora_rank lora_target loraplus_lr_embedding loraplus_lr_ratio mask_history
        micro_batch_size mix_strategy model_class model_name_or_path model_revision neat_packing
        new_special_tokens optim overwrite_cache peft_config pipeline_model_parallel_size plot_loss
        preprocessing_num_workers pure_bf16 quantization_bit quantization_method resize_vocab
        rope_scaling sample_backend save_only_model stage template tensor_model_parallel_size
        train_dataset train_on_prompt upcast_layernorm use_adam_mini use_apollo use_badam use_galore
        val_size video_fps video_max_pixels video_maxlen warmup_ratio
    """,
    "PEFT": "trainable_token_indices",
    "torchtune": """
        ac_mode apply_lora_to_mlp apply_lora_to_output batch_size batch_size_val checkpoint_dir
        checkpointer clip_grad_norm collate_fn compile custom_sharded_layers dataset dataset_val
        datasets device enable_activation_checkpointing enable_activation_offloading enable_kv_cache
        epochs fsdp fsdp_cpu_offload log_every_n_steps log_level log_peak_memory_stats lora_attn_modules
        lora_rank loss lr lr_scheduler max_seq_len max_seq_length max_steps_per_epoch metric_logger
        model_type num_warmup_steps optimizer optimizer_in_bwd packed profiler quantize_base quantizer
        run_val_every_n_steps save_adapter_weights_only save_every_n_epochs tensor_parallel_dim
        tensor_parallel_plan tokenizer use_flex
    """,
    "transformers": """
        activation_checkpointing activation_checkpointing_kwargs adam_beta1 adam_beta2 adam_epsilon
        auto_find_batch_size average_tokens_across_devices bf16 bf16_full_eval data_seed
        dataloader_drop_last dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory
        dataloader_prefetch_factor ddp_backend ddp_bucket_cap_mb ddp_find_unused_parameters ddp_timeout
        deepspeed device_map do_eval do_train eval_strategy evaluation_strategy fp16 fp16_full_eval fsdp
        fsdp_config gradient_checkpointing gradient_checkpointing_kwargs hub_always_push hub_strategy
        hub_token include_num_input_tokens_seen label_names length_column_name liger_kernel_config
        local_rank log_level logging_first_step logging_strategy neftune_noise_alpha optim optim_args
        optim_target_modules parallelism_config remove_unused_columns save_only_model save_strategy tf32
        torch_compile torch_compile_backend torch_compile_mode torch_dtype trackio_space_id
        train_sampling_strategy use_liger_kernel warmup_ratio
    """,
    "TRL": """
        activation_offloading assistant_only_loss bnb_4bit_quant_type chat_template_path
        completion_only_loss dataset_config dataset_kwargs dataset_name dataset_num_proc
        dataset_streaming dataset_test_split dataset_text_field dataset_train_split datasets eos_token
        eval_packing load_in_4bit load_in_8bit lora_modules_to_save lora_r lora_target_modules
        lora_target_parameters lora_task_type loss_type max_seq_length model_name_or_path model_revision
        packing_strategy pad_to_multiple_of pad_token padding_free router_aux_loss_coef seq_length
        shuffle_dataset truncation_mode use_bnb_nested_quant use_peft
    """,
    "Unsloth": """
        device_map embedding_learning_rate fast_inference finetune_last_n_layers finetune_vision_layers
        full_finetuning gpu_memory_utilization init_lora_weights layers_pattern layers_to_transform
        load_in_4bit load_in_8bit load_in_fp8 loftq_config max_lora_rank max_seq_length model_name
        qat_scheme random_state rope_scaling token tokenizer_name unsloth_tiled_mlp
        use_gradient_checkpointing
    """,
}
"""The keys of other toolkits that have an entry, by toolkit."""

UNSAID: Any = object()
"""In the place of a value: only the key is asked about."""

LEAVE_OUT = ""
"""The setting for a value that a recipe has by default: nothing is written."""

_MOST_SHOWN = 60
"""The most characters of a value that are written out in an answer."""


@dataclass(frozen=True)
class ForeignKey:
    """A key of other toolkits.

    Args:
        name: its last part, as they write it.
        ours: the recipe key that it means; None: no recipe key means it.
        note: what to know about it; without ``ours``: what to do instead.
        values: the settings that its values mean, by the value as text; other values are ours as well, unless
            ``translated``.
        translated: whether a value that ``values`` does not name has to be written otherwise here.
    """

    name: str
    ours: str | None
    note: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    translated: bool = False

    @property
    def toolkits(self) -> list[str]:
        """The toolkits that have the key."""
        return [toolkit for toolkit, names in KEYS_OF.items() if self.name in names.split()]

    def answer(self, path: str, value: Any = UNSAID) -> str:
        """Return the sentences about the key, as a user wrote it, and about its value.

        Args:
            path: the key as it was seen.
            value: its value, if there is one to speak of.
        """
        whose = f"{path} is a key of {', '.join(self.toolkits)}"
        if value is None:
            return f"{whose}. Without a value, leave it out."
        text = _as_text(value)
        if (setting := self.values.get(text.lower())) is not None:
            write = f"write `{setting}`" if setting else "leave it out"
            return f"{whose}. For {text}, {write}.{self._note()}"
        if self.ours is None:
            return f"{whose}, not of a recipe. {self.note}"
        if not text or self.translated or isinstance(value, (dict, list)) or len(text) > _MOST_SHOWN:
            return f"{whose}; in a recipe it is `{self.ours}`.{self._note()}"
        return f"{whose}; in a recipe, write `{self.ours}={text}`.{self._note()}"

    def knows(self, value: Any) -> bool:
        """Return whether the entry says what a value means."""
        return _as_text(value).lower() in self.values

    def _note(self) -> str:
        return f" {self.note}" if self.note else ""


def _as_text(value: Any) -> str:
    return "" if value is UNSAID else str(value).lower() if isinstance(value, bool) else str(value)


def _same(ours: str, names: str, note: str = "") -> Iterator[ForeignKey]:
    """Yield keys that take the same values as ours."""
    for name in names.split():
        yield ForeignKey(name, ours, note)


def _translated(ours: str, names: str, note: str = "", **values: str) -> Iterator[ForeignKey]:
    """Yield keys whose values are written otherwise; ``values``: the settings of those that are known."""
    for name in names.split():
        yield ForeignKey(name, ours, note, values, translated=True)


def _absent(names: str, instead: str, **values: str) -> Iterator[ForeignKey]:
    """Yield keys that a recipe has no key for."""
    for name in names.split():
        yield ForeignKey(name, None, instead, values)


def _switch(ours: str, setting: str, names: str, note: str = "") -> Iterator[ForeignKey]:
    """Yield keys that are true or false, where false is what a recipe has without the setting."""
    on = dict.fromkeys(("true", "auto"), setting)
    yield from _translated(ours, names, note=note, false=LEAVE_OUT, **on)


_OPTIMIZERS = {
    **dict.fromkeys(
        ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw", "adam"), "optimizer.name=adamw"
    ),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "adamw8bit"), "optimizer.name=adamw_bnb_8bit"),
    **{name: f"optimizer.name={name}" for name in ("paged_adamw_32bit", "paged_adamw_8bit", "lion_8bit")},
    **{name: f"optimizer.name={name}" for name in ("lion_32bit", "paged_lion_8bit", "sgd", "adafactor")},
    "paged_adamw": "optimizer.name=paged_adamw_32bit",
    "lion": "optimizer.name=lion",
}
_FLASH = "model.attn_implementation=flash_attention_2"
_FULL = "checkpointing.mode=full"

# fmt: off
_ENTRIES = (
    # model
    *_same("model.name_or_path", "base_model"),
    *_same("model.name_or_path", "model_name_or_path"),
    *_same("model.name_or_path", "model_name"),
    *_translated(
        "model.name_or_path", "checkpoint_dir checkpointer", note="It is a hub name or a folder."
    ),
    *_same("model.revision", "model_revision revision_of_model"),
    *_same("model.tokenizer_name_or_path", "tokenizer_config"),
    *_same("model.tokenizer_name_or_path", "tokenizer_name"),
    *_translated("model.tokenizer_name_or_path", "tokenizer", note="Without it, it is the model's own."),
    *_same("model.dtype", "torch_dtype"),
    *_translated("model.dtype", "bf16_full_eval fp16_full_eval"),
    *_switch("model.dtype", "model.dtype=bfloat16", "pure_bf16"),
    *_switch("model.quantization", "model.quantization=nf4", "load_in_4bit"),
    *_switch("model.quantization", "model.quantization=int8", "load_in_8bit"),
    *_switch("model.quantization", "model.quantization=nf4", "quantize_base"),
    *_switch(
        "model.quantization",
        "model.quantization=nf4",
        "quantize_moe_experts",
        note="Experts are packed with the other layers.",
    ),
    *_translated(
        "model.quantization",
        "quantization_bit",
        **{"4": "model.quantization=nf4", "8": "model.quantization=int8"},
    ),
    *_translated(
        "model.quantization", "bnb_4bit_quant_type", nf4="model.quantization=nf4",
        note="fp4 is not here.",
    ),
    *_translated(
        "model.quantization", "quantization_method", bnb=LEAVE_OUT, bitsandbytes=LEAVE_OUT,
        note="It is bitsandbytes; published MXFP4 and FP8 weights are recognised.",
    ),
    *_absent(
        "use_bnb_nested_quant double_quantization",
        instead="model.quantization=nf4 always packs its scales a second time.", true=LEAVE_OUT,
    ),
    *_switch(
        "model.attn_implementation", _FLASH, "flash_attention",
        note="Without it, auto takes the fastest that is there.",
    ),
    *_translated(
        "model.attn_implementation", "flash_attn", fa2=_FLASH, sdpa="model.attn_implementation=sdpa",
        disabled="model.attn_implementation=eager", auto=LEAVE_OUT, flash_attention_2=_FLASH,
    ),
    *_switch("model.attn_implementation", "model.attn_implementation=sdpa", "sdp_attention"),
    *_switch("model.attn_implementation", "model.attn_implementation=eager", "eager_attention"),
    *_absent(
        "xformers_attention",
        instead="model.attn_implementation=auto takes the fastest that is there.", false=LEAVE_OUT,
    ),
    *_switch(
        "model.attn_implementation", "model.attn_implementation=flex_attention", "flex_attention use_flex",
    ),
    *_switch("model.kernels", "model.kernels=liger", "use_liger_kernel"),
    *_switch("model.kernels", "model.kernels=liger", "enable_liger_kernel"),
    *_switch(
        "model.kernels", "model.kernels=liger", "liger_rope liger_rms_norm liger_glu_activation",
        note="One key for all of Liger's kernels.",
    ),
    *_absent(
        "liger_kernel_config liger_layer_norm liger_rms_norm_gated use_kernels",
        instead="model.kernels=liger takes the kernels that the model's layers have.",
    ),
    *_switch(
        "loss.chunk_tokens", LEAVE_OUT, "liger_fused_linear_cross_entropy cut_cross_entropy",
        note="The loss is computed by chunks of tokens, without the logits of a whole row, unless it is null.",
    ),
    *_absent("loss_type", instead="The loss is cross entropy, by chunks of tokens.", nll=LEAVE_OUT),
    *_absent("loss", instead="The loss is cross entropy, by chunks of tokens; loss.chunk_tokens sets them."),
    *_absent(
        "compile torch_compile torch_compile_backend torch_compile_mode",
        instead="Techniques change forwards at run time, which torch.compile would undo; model.kernels=liger "
        "has fused operators.", false=LEAVE_OUT,
    ),
    *_absent(
        "model_type tokenizer_type processor_type model_class type_of_model",
        instead="The classes are those that the model's config names. Leave it out.",
    ),
    *_absent(
        "rope_scaling",
        instead="Positions are those of the model's config: set rope_parameters in a copy's config.json.",
    ),
    *_absent(
        "device_map",
        instead="offload.parameters=stream keeps weights on the host; distributed.strategy=fsdp2 spreads them.",
    ),
    *_absent(
        "fast_inference gpu_memory_utilization max_lora_rank infer_backend sample_backend enable_kv_cache",
        instead="A recipe trains; serve the saved model with the program that you like.",
    ),
    *_absent("qat_scheme qat quantizer",
             instead="Training for later quantization is not here; train, then quantize the saved model."),
    *_absent("fp8 load_in_fp8",
             instead="FP8 products are not here; a model published in FP8 trains with adapter.name=lora."),
    # adapters
    *_translated(
        "adapter.name", "adapter", lora="adapter.name=lora",
        qlora="adapter.name=lora model.quantization=nf4",
    ),
    *_translated(
        "adapter.name", "finetuning_type", lora="adapter.name=lora", full=LEAVE_OUT,
        note="freeze and oft are not here.",
    ),
    *_switch("adapter.name", "adapter.name=lora", "use_peft"),
    *_translated("adapter.name", "full_finetuning", true=LEAVE_OUT, false="adapter.name=lora"),
    *_translated("adapter.name", "peft_config", note="Its keys are those of `adapter`."),
    *_same("adapter.r", "lora_r"),
    *_same("adapter.r", "lora_rank"),
    *_same("adapter.target_modules", "lora_target_modules"),
    *_translated(
        "adapter.target_modules", "lora_target", all="adapter.target_modules=[all-linear]",
        note="It is a list.",
    ),
    *_translated("adapter.target_modules", "lora_attn_modules", note="Attention's are q_proj, k_proj, ..."),
    *_switch(
        "adapter.target_modules", "adapter.target_modules=[all-linear]", "lora_target_linear",
        note="all-linear is the default.",
    ),
    *_translated(
        "adapter.target_modules", "apply_lora_to_mlp apply_lora_to_output",
        note="Name gate_proj, up_proj and down_proj in it.",
    ),
    *_same("adapter.target_parameters", "lora_target_parameters"),
    *_same("adapter.use_dora", "peft_use_dora"),
    *_same("adapter.use_rslora", "peft_use_rslora"),
    *_translated(
        "adapter.kernel", "lora_mlp_kernel lora_qkv_kernel lora_o_kernel", true=LEAVE_OUT,
        false="adapter.kernel=peft", note="A fused adapter is the default for every layer.",
    ),
    *_absent("lora_task_type", instead="The task is always CAUSAL_LM. Leave it out.", causal_lm=LEAVE_OUT),
    *_absent(
        "lora_model_dir adapter_name_or_path",
        instead="An adapter is trained from its start: `lowmem-ft merge` adds one to its base, which then is "
        "model=FOLDER.",
    ),
    *_absent(
        "lora_fan_in_fan_out loftq_config init_lora_weights layers_to_transform layers_pattern "
        "finetune_last_n_layers loraplus_lr_ratio loraplus_lr_embedding",
        instead="Adapters start as PEFT's default does, in all layers that adapter.target_modules names, with one "
        "learning rate.",
    ),
    *_absent(
        "unfrozen_parameters freeze_trainable_layers freeze_trainable_modules",
        instead="Train adapters (adapter.name=lora, adapter.target_modules) or all weights.",
    ),
    *_absent(
        "freeze_vision_tower freeze_multi_modal_projector finetune_vision_layers",
        instead="A vision tower and its projector are always frozen. Leave it out.", true=LEAVE_OUT,
    ),
    *_absent(
        "image_max_pixels video_max_pixels video_fps video_maxlen skip_prepare_dataset",
        instead="Rows are text: an image or video is refused, and a model's tower stays as it is.",
    ),
    *_same("adapter.modules_to_save", "lora_modules_to_save"),
    *_translated("adapter.modules_to_save", "additional_target", note="It is a list."),
    *_translated("adapter.train_new_tokens", "trainable_token_indices",
                 note="It is true or false: the rows of model.add_tokens and model.add_special_tokens are trained."),
    *_same("model.add_tokens", "tokens"),
    *_translated("model.add_special_tokens", "new_special_tokens", note="It is a list."),
    *_absent("save_adapter_weights_only",
             instead="With adapter.name=lora the adapter alone is saved. Leave it out."),
    *_absent("special_tokens eos_token pad_token eot_tokens resize_vocab",
             instead="Set it in the tokenizer's own files, and name their folder by model.tokenizer_name_or_path."),
    # data
    *_translated("data.path", "datasets test_datasets", note="A local file, a folder or a hub name."),
    *_same("data.path", "dataset_name train_dataset"),
    *_translated("data.path", "dataset dataset_dir", note="A local file, a folder or a hub name."),
    *_same("data.name", "dataset_config"),
    *_same("data.split", "dataset_train_split"),
    *_same("data.eval_split", "dataset_test_split"),
    *_translated("data.eval_path", "eval_dataset dataset_val", note="A local file or a hub name."),
    *_same("data.eval_size", "val_set_size"),
    *_same("data.eval_size", "val_size"),
    *_same("data.streaming", "dataset_streaming"),
    *_same("data.text_column", "dataset_text_field"),
    *_same("data.max_length", "sequence_len max_packed_sequence_len"),
    *_same("data.max_length", "cutoff_len"),
    *_same("data.max_length", "max_seq_len"),
    *_same("data.max_length", "max_seq_length"),
    *_same("data.max_length", "seq_length", note="It is the older name of max_length there."),
    *_same("data.packing", "sample_packing"),
    *_same("data.packing", "packed"),
    *_translated(
        "data.packing", "neat_packing", true="data.packing=true", false=LEAVE_OUT,
        note="Attention of packed examples is always separate.",
    ),
    *_absent("packing_strategy padding_free truncation_mode eval_packing eval_sample_packing",
             instead="data.packing=true fills rows by best fit, in training and evaluation."),
    *_absent("pad_to_sequence_len pad_to_multiple_of",
             instead="Rows are padded to the longest of their micro-batch; data.packing=true fills them.",
             false=LEAVE_OUT),
    *_translated(
        "data.chat_template", "template chat_template_path",
        note="It is a file with a Jinja template; without it, the tokenizer's own.",
    ),
    *_switch("data.loss_on", "data.loss_on=all", "train_on_inputs train_on_prompt"),
    *_switch("data.loss_on", "data.loss_on=assistant", "assistant_only_loss"),
    *_switch("data.loss_on", "data.loss_on=completion", "completion_only_loss mask_history"),
    *_translated(
        "data.loss_on", "roles_to_train train_on_eos",
        note="Assistant turns are learnt with the token that ends them.",
    ),
    *_same("data.num_proc", "dataset_num_proc"),
    *_same("data.num_proc", "dataset_processes"),
    *_same("data.num_proc", "preprocessing_num_workers"),
    *_same("data.shuffle", "shuffle_dataset"),
    *_absent(
        "dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor dataloader_drop_last "
        "dataloader_persistent_workers",
        instead="Rows are tokenized before the first step and mapped from disk, so that there are no "
        "workers to set. Leave it out.",
    ),
    *_absent(
        "dataset_prepared_path overwrite_cache push_dataset_to_hub dataset_kwargs",
        instead="Tokenized rows are in the cache of `datasets`, under HF_DATASETS_CACHE, and made again when "
        "their text or a key changes.",
    ),
    *_absent("remove_unused_columns label_names length_column_name",
             instead="Columns that are not read are named in the log. Leave it out.", false=LEAVE_OUT),
    *_translated("data.group_by_length", "train_sampling_strategy",
                 group_by_length="data.group_by_length=true", random=LEAVE_OUT,
                 sequential="data.shuffle=false"),
    *_absent("collate_fn", instead="Rows are collated by data.packing and padding alone. Leave it out."),
    *_translated(
        "data.sources", "mix_strategy interleave_probs",
        note="Each source has its weight or repeats; data.stopping_strategy says when an epoch ends.",
    ),
    # training
    *_absent("stage do_train do_eval rl",
             instead="A recipe trains on examples; for preferences and rewards take TRL's trainer with "
             "`lowmem_ft.hf.attach`.", sft=LEAVE_OUT, true=LEAVE_OUT),
    *_same("training.per_device_train_batch_size", "micro_batch_size"),
    *_same("training.per_device_train_batch_size", "batch_size"),
    *_same("training.per_device_eval_batch_size", "batch_size_val eval_batch_size"),
    *_absent("auto_find_batch_size",
             instead="A step that runs out of memory starts over with smaller micro-batches (budget.retry).",
             true=LEAVE_OUT, false=LEAVE_OUT),
    *_same("training.num_train_epochs", "num_epochs"),
    *_same("training.num_train_epochs", "epochs"),
    *_translated("training.max_steps", "max_steps_per_epoch", note="It counts the steps of all epochs."),
    *_same("training.learning_rate", "lr"),
    *_same("training.lr_scheduler_type", "lr_scheduler"),
    *_translated("training.lr_scheduler_kwargs", "cosine_min_lr_ratio",
                 note="Write training.lr_scheduler_type=cosine_with_min_lr with {min_lr_rate: RATIO}."),
    *_same("training.warmup_steps", "warmup_ratio",
           note="A value below 1 is a share of all steps."),
    *_same("training.warmup_steps", "num_warmup_steps"),
    *_same("training.max_grad_norm", "clip_grad_norm"),
    *_switch(
        "training.mixed_precision", "training.mixed_precision=bf16", "bf16",
        note="With model.dtype=bfloat16 the weights are in bf16 too.",
    ),
    *_switch("training.mixed_precision", "training.mixed_precision=fp16", "fp16"),
    *_absent(
        "tf32", instead="Products are in the precision that torch is set to; "
        "training.mixed_precision=bf16 is as fast.", false=LEAVE_OUT,
    ),
    *_absent("upcast_layernorm", instead="Norms compute in float32 as the model's code does."),
    *_switch("checkpointing.mode", _FULL, "gradient_checkpointing activation_checkpointing"),
    *_switch("checkpointing.mode", _FULL, "enable_activation_checkpointing"),
    *_translated("checkpointing.mode", "disable_gradient_checkpointing", true=LEAVE_OUT, false=_FULL),
    *_translated(
        "checkpointing.mode", "use_gradient_checkpointing", true=_FULL, false=LEAVE_OUT,
        unsloth=f"{_FULL} offload.activations=inputs",
    ),
    *_translated("checkpointing.mode", "ac_mode", selective="checkpointing.mode=selective", full=_FULL),
    *_absent("gradient_checkpointing_kwargs activation_checkpointing_kwargs",
             instead="Checkpointing is never reentrant; checkpointing.every_n_layers and skip_last_layers tune it."),
    *_switch("offload.activations", "offload.activations=all", "activation_offloading"),
    *_switch("offload.activations", "offload.activations=all", "enable_activation_offloading"),
    *_same("optimizer.in_backward", "optimizer_in_bwd"),
    *_translated("optimizer.name", "optim optimizer", note="Those of a recipe: "
                 "`lowmem-ft recipes NAME` lists them.", **_OPTIMIZERS),
    *_translated("optimizer.betas", "adam_beta1 adam_beta2", note="It is a list of two."),
    *_same("optimizer.eps", "adam_epsilon"),
    *_absent("optim_args optim_target_modules use_galore use_apollo use_badam use_adam_mini",
             instead="optimizer.state=8bit and optimizer.master=split24 save most of the "
             "optimizer's memory, with AdamW's own mathematics or close to it."),
    *_absent("neftune_noise_alpha", instead="Noise on embeddings is in a Trainer only: take "
             "`lowmem_ft.hf.attach` with it."),
    *_absent("embedding_learning_rate embedding_lr",
             instead="All weights have one learning rate, training.learning_rate."),
    *_absent("router_aux_loss_coef", instead="A router's loss is in the training loss as the model's config "
             "says: router_aux_loss_coef and output_router_logits there."),
    *_same("training.seed", "random_state data_seed"),
    *_translated("training.use_cpu", "device", cuda=LEAVE_OUT, cpu="training.use_cpu=true"),
    # evaluation, checkpoints, logs
    *_same("training.eval_generations", "eval_table_size"),
    *_same("training.max_new_tokens", "eval_max_new_tokens"),
    *_translated("training.profile_steps", "profiler", note="It is the first and the last step."),
    *_translated("training.eval_steps", "evals_per_epoch", note="It counts steps between evaluations."),
    *_same("training.eval_steps", "run_val_every_n_steps"),
    *_translated("training.eval_steps", "eval_strategy evaluation_strategy", no=LEAVE_OUT,
                 steps=LEAVE_OUT, false=LEAVE_OUT, note="It counts steps between evaluations; there is always one "
                 "at the end."),
    *_translated("training.save_steps", "saves_per_epoch save_every_n_epochs",
                 note="It counts steps between checkpoints."),
    *_translated("training.save_steps", "save_strategy", no="training.save_steps=null",
                 false="training.save_steps=null", steps=LEAVE_OUT,
                 note="It counts steps between checkpoints; the finished model is always saved."),
    *_absent("save_only_model",
             instead="A checkpoint always resumes bitwise; training.save_steps=null writes none.", false=LEAVE_OUT),
    *_switch("training.resume_from_checkpoint", "training.resume_from_checkpoint=auto", "auto_resume_from_checkpoints"),
    *_same("training.logging_steps", "log_every_n_steps"),
    *_absent("logging_strategy logging_first_step log_level plot_loss log_peak_memory_stats "
             "include_num_input_tokens_seen",
             instead="Every step's loss, tokens and memory are in metrics.jsonl; `lowmem-ft report RUN` shows them, "
             "training.report_to sends them to a tracker."),
    *_translated("training.report_to", "metric_logger", note="[tensorboard], [wandb] or [trackio]."),
    *_same("training.project", "wandb_project", note="With training.report_to=[wandb]."),
    *_same("training.project", "trackio_project_name", note="With training.report_to=[trackio]."),
    *_same("training.run_name", "wandb_name wandb_run_id trackio_run_name"),
    *_absent("wandb_entity wandb_watch wandb_log_model wandb_mode trackio_space_id",
             instead="Set the tracker's own environment variable, such as WANDB_ENTITY."),
    *_absent("hub_token hub_strategy hub_always_push token",
             instead="`hf auth login` or HF_TOKEN gives access; training.push_to_hub=true uploads the finished model."),
    *_absent("export_dir export_size export_device export_legacy_format",
             instead="`lowmem-ft export RUN OUT_DIR --merged` writes the merged model."),
    *_absent("loss_watchdog_threshold loss_watchdog_patience",
             instead="Steps whose loss or gradients are not finite are skipped, training.max_skipped_steps in a row."),
    *_absent("average_tokens_across_devices",
             instead="The loss is always the mean over the tokens of all processes. Leave it out.", true=LEAVE_OUT),
    *_translated("tiling.mlp", "unsloth_tiled_mlp", false=LEAVE_OUT, note="It is the number of tiles."),
    # several GPUs
    *_translated("distributed.strategy", "deepspeed",
                 note="zero2 or zero3; the other settings are ours."),
    *_translated("distributed.strategy", "fsdp fsdp_config fsdp_version dp_shard_size dist_config",
                 note="fsdp2 shards weights, gradients and state."),
    *_same("distributed.cpu_offload", "fsdp_cpu_offload"),
    *_absent("tensor_parallel_dim tensor_parallel_plan tensor_model_parallel_size pipeline_model_parallel_size "
             "context_parallel_size sequence_parallel_degree cp_size parallelism_config",
             instead="GPUs share the work by data alone: distributed.strategy=ddp, fsdp2, zero2 or zero3."),
    *_absent("custom_sharded_layers", instead="fsdp2 shards embeddings and the head as well. Leave it out."),
    *_absent("ddp_timeout ddp_backend ddp_find_unused_parameters ddp_bucket_cap_mb local_rank",
             instead="Say it where the run is launched: `accelerate launch`, or distributed.num_processes."),
)
# fmt: on

FOREIGN_KEYS: Mapping[str, ForeignKey] = {entry.name: entry for entry in _ENTRIES}
