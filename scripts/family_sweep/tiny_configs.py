"""A tiny config of any causal LM of transformers: its config class's defaults, shrunk to a size for a CPU.

Sizes shrink by their names. Of the layers, the first of each kind stays, so that the tiny model runs all the code that
a large one runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from measuring.families import MAX_POSITIONS, VOCABULARY
from transformers import CONFIG_MAPPING, PretrainedConfig

_HEADS, _HEAD_SIZE, _ROTATED, _WIDTH = 4, 16, 8, 64

_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

_SIZES: dict[str, int] = {
    **dict.fromkeys(
        ("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size", "encoder_hash_byte_group_vocab"),
        VOCABULARY,
    ),
    **dict.fromkeys(
        (
            *("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"),
            *("model_max_length", "max_target_positions", "original_max_position_embeddings"),
        ),
        MAX_POSITIONS,
    ),
    **dict.fromkeys(
        (
            *(
                "hidden_size",
                "n_embd",
                "d_model",
                "emb_dim",
                "embedding_dim",
                "word_embed_proj_dim",
                "lru_width",
            ),
            *(
                "embedding_size",
                "input_embedding_size",
                "output_embedding_size",
                "rnn_hidden_size",
                "hidden_size_global",
            ),
        ),
        _WIDTH,
    ),
    **dict.fromkeys(
        (
            *(
                "intermediate_size",
                "ffn_dim",
                "encoder_ffn_dim",
                "decoder_ffn_dim",
                "ffn_hidden_size",
                "dff",
                "dim_ff",
            ),
            *(
                "intermediate_size_mlp",
                "dense_intermediate_size",
                "shared_intermediate_size",
                "feed_forward_size",
            ),
            "n_inner",
            "d_inner",
        ),
        96,
    ),
    **dict.fromkeys(
        (
            *("moe_intermediate_size", "shared_expert_intermediate_size", "shared_experts_intermediate_size"),
            *("expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
        ),
        48,
    ),
    **dict.fromkeys(
        (
            *(
                "num_attention_heads",
                "n_head",
                "n_heads",
                "num_heads",
                "attention_heads",
                "swa_num_attention_heads",
            ),
            *("encoder_attention_heads", "decoder_attention_heads", "num_encoder_attention_heads"),
            *("num_decoder_attention_heads", "num_key_value_heads_dense"),
        ),
        _HEADS,
    ),
    **dict.fromkeys(
        ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_global_key_value_heads"), 2
    ),
    **dict.fromkeys(
        (
            *("head_dim", "swa_head_dim", "d_head", "attention_head_size", "dim_head", "kv_channels"),
            *(
                "v_head_dim",
                "qk_nope_head_dim",
                "linear_key_head_dim",
                "linear_value_head_dim",
                "linear_head_dim",
            ),
            *("index_head_dim", "kv_lora_rank", "q_lora_rank", "query_pre_attn_scalar", "o_lora_rank"),
            *("ngram_embed_dim", "swa_v_head_dim", "index_hidden_size"),
        ),
        _HEAD_SIZE,
    ),
    "global_head_dim": 2 * _HEAD_SIZE,
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), _ROTATED),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "num_expert_group"), 2),
    "topk_group": 1,
    **dict.fromkeys(
        ("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads", "index_n_heads", "o_groups"), 2
    ),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 1),
    **dict.fromkeys(("index_topk", "index_block_size", "index_topk_blocks"), 4),
    **dict.fromkeys(
        (
            *(
                "sliding_window",
                "sliding_window_size",
                "attention_chunk_size",
                "window_size",
                "local_attention",
            ),
            *("attention_window_size", "keep_window_size", "floor_scale", "rel_extent"),
        ),
        16,
    ),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 4),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "block_size"), 16),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank", "laurel_rank", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("gated_norm_rank", "adapter_rank", "hc_lowrank", "d_rel", "router_hidden_size"), 8),
    **dict.fromkeys(("mamba_ngroups", "n_groups"), 2),
    "mamba_n_groups": 1,
}
"""Value of each size, by its name in any config."""

_COUNTS_OF_LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "encoder_layers",
)

_ONE_KEY_HEAD_PER_HEAD: dict[str, Any] = {"num_key_value_heads": _HEADS}
_HUNYUAN: dict[str, Any] = {
    "head_dim": _HEAD_SIZE,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
_LATENT: dict[str, Any] = {**_ONE_KEY_HEAD_PER_HEAD, "head_dim": _ROTATED}
_DOTS3: dict[str, Any] = {**_ONE_KEY_HEAD_PER_HEAD, "head_dim": 2 * _HEAD_SIZE + _ROTATED}
_QWEN4: dict[str, Any] = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "ngram_vocab_size_base": 64,
    "split_ngram_parts": 1,
}
_GEMMA3N: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "intermediate_size": [96] * 4,
    "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
}

_DRAFT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": _WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": 2,
    "head_dim": _HEAD_SIZE,
    "num_kv_shared_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}

_OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            *(
                "axk2",
                "bailing_hybrid",
                "deepseek_v32",
                "glm4_moe_lite",
                "glm_moe_dsa",
                "kimi_linear",
                "hy_v4",
            ),
            "minicpm3",
        ),
        _ONE_KEY_HEAD_PER_HEAD,
    ),
    **dict.fromkeys(("axk1", "deepseek_v3", "longcat_flash", "sarvam_mla", "youtu"), _LATENT),
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": _WIDTH, "ffn_hidden_size": 48},
    },
    "dory": {  # its dictionary counts attention and MLP of a layer as two
        "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp"] * 2,
        "num_hidden_layers": 8,
        "n_input_layers": 2,
        "n_recurrent_layers": 4,
        "n_output_layers": 2,
    },
    "dots3_note": {
        "text_config": _DOTS3,
        "audio_config": {"adapter_input_size": _WIDTH, "adapter_out_dim": _WIDTH},
        "vision_config": {"adapter_in_dim": _WIDTH, "adapter_out_dim": _WIDTH},
    },
    "dots3_note_text": _DOTS3,
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": None},
    },
    "deepseek_v2": {**_ONE_KEY_HEAD_PER_HEAD, "num_experts_per_tok": 2},
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma3n": {"text_config": _GEMMA3N},
    "gemma3n_text": _GEMMA3N,
    "gemma4_assistant": {
        "text_config": {
            **_DRAFT,
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        }
    },
    "gemma4_unified_assistant": {"text_config": {**_DRAFT, "model_type": "gemma4_unified_text"}},
    "granitemoehybrid": {"num_local_experts": 4, "layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": {**_HUNYUAN, "num_experts": 4, "moe_topk": 2},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 1},
    "lfm2": {
        "num_hidden_layers": 2,
        "layer_types": ["conv", "full_attention"],
        "full_attn_idxs": None,
        "block_auto_adjust_ff_dim": False,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "ministral": {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
    "qwen4_exp_text": _QWEN4,
    "qwen4_exp": {"text_config": _QWEN4},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
"""Fields of a type that its names of sizes do not give."""


def tiny_config(model_type: str) -> PretrainedConfig:
    """Return a tiny config of a type, in which every kind of layer of its family is present."""
    config_class = CONFIG_MAPPING[model_type]
    own = _OWN.get(model_type, {})
    if model_type.endswith("_assistant"):
        return config_class(**own)  # these have no defaults that they accept
    return config_class(**_shrunk(config_class().to_dict(), own))


def _shrunk(fields: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    layers = _kept_layers(fields)
    for name, value in fields.items():
        if isinstance(value, dict) and "model_type" in value:
            result[name] = _shrunk(value, own.get(name, {}))
        elif name in _SIZES and isinstance(value, int) and not isinstance(value, bool) and value > 0:
            result[name] = _SIZES[name]
        elif name in _SIZES and isinstance(value, list) and len(value) == _num_layers(fields):
            result[name] = [_SIZES[name]] * len(layers)
        elif name in _COUNTS_OF_LAYERS:
            result[name] = len(layers)
        elif _lists_all_layers(value, fields):
            result[name] = list(range(len(layers)))
        elif name in _TOKENS:
            result[name] = _TOKENS[name]
        elif isinstance(value, list) and (name == "layer_types" or len(value) == _num_layers(fields)):
            result[name] = [value[index] for index in layers]
        elif name == "per_layer_config" and isinstance(value, dict):
            result[name] = _kept_layer_fields(fields, layers, own)
        elif "drop" in name and isinstance(value, float):
            result[name] = 0.0
    return {
        **result,
        **{name: value for name, value in own.items() if not isinstance(result.get(name), dict)},
    }


def _kept_layer_fields(
    fields: Mapping[str, Any], layers: list[int], own: Mapping[str, Any]
) -> dict[int, dict[str, Any]]:
    """Return the fields that differ between layers; a layer's own size is twice the size of the others."""
    written = {int(index): values for index, values in fields["per_layer_config"].items()}
    sizes = {**_SIZES, **own}
    return {
        place: {name: 2 * sizes[name] for name in written[index]}
        for place, index in enumerate(layers)
        if index in written
    }


def _num_layers(fields: Mapping[str, Any]) -> int:
    return next((fields[name] for name in _COUNTS_OF_LAYERS if isinstance(fields.get(name), int)), 0)


def _lists_all_layers(value: object, fields: Mapping[str, Any]) -> bool:
    """Return whether a list names every layer by its index, such as Llama 4's layers with experts."""
    return isinstance(value, list) and len(value) > 0 and value == list(range(_num_layers(fields)))


def _kept_layers(fields: Mapping[str, Any]) -> list[int]:
    """Return the indices of the first layer of each kind, by all lists that say something of each layer."""
    num_layers = _num_layers(fields)
    lists = [
        value
        for value in fields.values()
        if isinstance(value, list) and len(value) == num_layers and not _lists_all_layers(value, fields)
    ]
    own = {int(index): str(values) for index, values in (fields.get("per_layer_config") or {}).items()}
    kinds: dict[tuple[str, ...], int] = {}
    for index in range(num_layers):
        kinds.setdefault((own.get(index, ""), *(str(values[index]) for values in lists)), index)
    kept = sorted(kinds.values())
    return kept if len(kept) > 1 else [0, *kept][:2] if num_layers else [0, 0]
