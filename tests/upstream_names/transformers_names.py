"""Names of transformers."""

from __future__ import annotations

from upstream_names.upstream_name import called, data, replaced

_FLASH = "transformers.modeling_flash_attention_utils"
_MODEL = "transformers.modeling_utils.PreTrainedModel"
_LOADED = "transformers.PreTrainedModel.from_pretrained()"

TRANSFORMERS = (
    replaced(
        "transformers.utils.import_utils", "is_fake_tensor", "x", "masks and kernels as with real tensors"
    ),
    replaced(
        _FLASH,
        "_lazy_imports",
        "implementation attention_wrapper allow_all_kernels",
        "flash-attn without having it: five functions, the last two those of the row below",
    ),
    called(
        _FLASH,
        "_flash_attention_forward",
        "query_states key_states value_states attention_mask query_length is_causal",
        "put where three architectures would have imported it",
    ),
    called(
        "transformers.integrations.hub_kernels",
        "use_kernel_func_from_hub_with_fallback",
        "func_name package internal_path",
        "its closures decide whose kernels a layer with a recurrent state calls",
    ),
    called(_FLASH, "_pad_input", "hidden_states indices batch seqlen", "handed back to transformers"),
    called(_FLASH, "_unpad_input", "hidden_states attention_mask", "handed back to transformers"),
    *data(_FLASH, "_loaded_implementation", "None: what is loaded is asked for again"),
    replaced(
        _MODEL,
        "_flash_attn_can_dispatch",
        "self flash_attn_version is_init_check",
        "flash-attn without having it",
    ),
    *data(_MODEL, "_keys_to_ignore_on_save", "what save_pretrained leaves out"),
    *data(
        _MODEL,
        "_supports_flash_attn _supports_sdpa _supports_flex_attn _supports_attention_backend",
        "which attention kernels a model takes",
        "bool",
    ),
    *data(
        "transformers.PretrainedConfig", "_attn_implementation", "which one it was loaded with", "property"
    ),
    *data(
        "transformers.modeling_layers.GradientCheckpointingLayer()",
        "_gradient_checkpointing_func",
        "how a layer is recomputed. Up to 5.22 layers checkpoint their `__call__`, in 5.23 their `forward`: a "
        "technique that calls layers itself asks which",
    ),
    called(
        "transformers.integrations.moe",
        "_grouped_mm",
        "input weight offs",
        "each expert's rows by its weight",
    ),
    called(
        "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts",
        "_apply_gate",
        "self gate_up_out",
        "a family's own gate, between the products of experts",
    ),
    replaced(
        "transformers.integrations.moe",
        "_can_use_grouped_mm",
        "input weight offs",
        "experts multiplied as on CUDA",
    ),
    replaced(
        "transformers.core_model_loading",
        "_materialize_copy",
        "tensor device dtype",
        "a checkpoint's shapes instead of its values",
    ),
    *data(
        "transformers.modeling_utils", "str_to_torch_dtype", "dtypes of safetensors by their names", "dict"
    ),
    replaced(
        "transformers.modeling_utils",
        "_get_resolved_checkpoint_files",
        None,
        "a script's weights stay on the hub",
    ),
    replaced(
        "transformers.modeling_utils",
        "_get_dtype",
        "dtype checkpoint_files config sharded_metadata state_dict weights_only hf_quantizer",
        "the type of weights that are not read",
    ),
    *data(_MODEL, "_keep_in_fp32_modules", "weights that no quantiser packs", "NoneType"),
    *data(_LOADED, "_weight_conversions", "taken off: a model that was unpacked is saved unpacked", "list"),
    *data(_LOADED, "_is_hf_initialized", "packed experts have no tensors to initialise", "bool"),
    replaced(
        _MODEL,
        "_load_pretrained_model",
        "model state_dict checkpoint_files load_config expected_keys",
        "shapes in place of weights",
    ),
    replaced(
        "transformers.generation.utils.GenerationMixin",
        "_beam_search_has_unfinished_sequences",
        "is_early_stop_heuristic_unsatisfied is_sent_finished next_token_hits_stopping_criteria early_stopping",
        "beam search to its length",
    ),
    replaced(
        "transformers.generation.utils.GenerationMixin",
        "_update_finished_beams",
        "self sequences topk_running_sequences beam_scores topk_log_probs beam_indices topk_running_beam_indices "
        "is_early_stop_heuristic_unsatisfied is_sent_finished next_token_hits_stopping_criteria top_num_beam_mask "
        "num_beams cur_len decoder_prompt_len length_penalty early_stopping",
        "how long the result of a beam search is",
    ),
    replaced(
        "transformers.Trainer",
        "_save_checkpoint",
        "self model trial",
        "weights and state are at rest meanwhile",
    ),
    replaced(
        "transformers.Trainer", "_load_from_checkpoint", "self resume_from_checkpoint model", "the same"
    ),
    replaced("transformers.Trainer", "_load_best_model", "self", "the same"),
    *(
        replaced(
            "transformers.Trainer", name, "self output_dir", "a checkpoint is whole before it has its name"
        )
        for name in ("_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state")
    ),
    called("transformers.Trainer", "_get_output_dir", "self trial", "where its checkpoints are"),
    replaced("transformers.Trainer", "_load_optimizer_and_scheduler", "self checkpoint", "the same"),
    *data(
        "transformers.AutoModelForCausalLM",
        "_model_mapping",
        "whether a config has a causal LM",
        "_LazyAutoMapping",
    ),
)
