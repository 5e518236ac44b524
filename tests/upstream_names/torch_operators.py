"""Names of torch's operators."""

from __future__ import annotations

from upstream_names.upstream_name import called, data, each

_ATEN = "torch.ops.aten"

OPERATORS = (
    *each(
        "called",
        "torch.ops.c10d",
        "_allgather_base_ _reduce_scatter_base_",
        "what FSDP2 exchanges: bytes on the clock, buffers in the timeline",
    ),
    *data(
        "torch.ops",
        "_c10d_functional",
        "what DTensor exchanges: bytes on the clock, results in the timeline",
        "_OpNamespace",
    ),
    *each(
        "called",
        _ATEN,
        "_thnn_fused_gru_cell_backward _ctc_loss _ctc_loss_backward _pack_padded_sequence",
        "operators with a rule of ours, as torch has none",
    ),
    called(
        _ATEN,
        "_fused_adamw_",
        "self grads exp_avgs exp_avg_sqs max_exp_avg_sqs state_steps * lr beta1 beta2 weight_decay eps amsgrad "
        "maximize",
        "torch's AdamW on a chunk of float32 tensors, in one kernel",
    ),
    called(
        _ATEN,
        "_flash_attention_forward",
        "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask * scale "
        "window_size_left window_size_right",
        "flash-attn's kernel, which torch has as well",
    ),
    called(
        _ATEN,
        "_scaled_dot_product_flash_attention",
        "query key value dropout_p is_causal return_debug_mask * scale",
        "attention as CUDA takes it",
    ),
    called(
        _ATEN,
        "_scaled_dot_product_cudnn_attention",
        "query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask * scale",
        "attention as CUDA takes it",
    ),
    called(
        _ATEN,
        "_scaled_dot_product_efficient_attention",
        "query key value attn_bias compute_log_sumexp dropout_p is_causal * scale",
        "attention as CUDA takes it",
    ),
    called(
        _ATEN,
        "_scaled_dot_product_attention_math",
        "query key value attn_mask dropout_p is_causal dropout_mask * scale enable_gqa",
        "attention as CUDA takes it",
    ),
    called(_ATEN, "_softmax", "self dim half_to_float", "CUDA's kernel reads float16 itself; its buffers"),
    called(
        _ATEN, "_log_softmax", "self dim half_to_float", "CUDA's kernel reads float16 itself; its buffers"
    ),
    called(_ATEN, "_softmax_backward_data", "* grad_output output", "buffers of its CUDA kernel"),
    called(_ATEN, "_log_softmax_backward_data", "* grad_output output", "buffers of its CUDA kernel"),
    *each(
        "called",
        _ATEN,
        "_flash_attention_backward _foreach_norm _index_put_impl_",
        "buffers of their CUDA kernels",
    ),
    called(_ATEN, "_unsafe_index_put", "self indices values accumulate", "what it writes has one type"),
    *each("called", "torch.ops.torch_attn", "_varlen_attn_backward", "buffers of its CUDA kernel"),
    *each(
        "called",
        _ATEN,
        "_scaled_dot_product_flash_attention_backward _scaled_dot_product_cudnn_attention_backward "
        "_scaled_dot_product_efficient_attention_backward",
        "buffers of their CUDA kernels",
    ),
    called(_ATEN, "_to_copy", "self * dtype device", "copies over the host link"),
    called(_ATEN, "_local_scalar_dense", "self", "a program that reads a value waits for the device"),
    called(_ATEN, "_pin_memory", "self", "memory that is pinned"),
    called(
        _ATEN, "_unique2", "self sorted return_inverse return_counts", "a result whose size depends on values"
    ),
    *each("called", _ATEN, "_unsafe_view", "moves no byte"),
    *each("called", _ATEN, "_fused_sgd_ _fused_adagrad_", "fused steps that torch has no fake rule for"),
    *each(
        "called",
        _ATEN,
        "_convolution _cudnn_rnn _thnn_fused_lstm_cell _thnn_fused_gru_cell",
        "in the list of what autocast computes in 16 bits",
    ),
    *each(
        "called",
        _ATEN,
        "_foreach_copy_ _scaled_mm _amp_foreach_non_finite_check_and_unscale_ _fused_adam_",
        "what CUDA refuses of a call",
    ),
)
