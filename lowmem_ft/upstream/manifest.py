"""Every name of another library that the package relies on and that the library does not document, with what for.

Tests hold the list to the installed libraries and the sources to the list: a name that a library renames fails, and so
does a new one that nobody wrote down. Where a name is used is found by searching for it.

A row belongs to an owner: a module, or a class; ``nn.Module()`` with brackets is an object of it, whose attributes are
there only once it is made. What operators take is read off their schemas as it is off functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["called", "replaced", "class", "module", "data"]


@dataclass(frozen=True)
class UpstreamName:
    """One name.

    Attributes:
        owner: the module or class that has it, such as ``torch._C`` or ``torch.nn.Module()``.
        name: the name itself.
        purpose: what it is relied on for.
        kind: what it must be; ``called``: a function or operator of theirs that we call; ``replaced``: a function of
            theirs in whose place they call ours.
        parameters: of what is called, those that we pass: by position up to ``*``, by name behind it. Of what is
            replaced, all that it has. None where it tells nobody, as most of what is written in C++, or where ours
            passes on whatever it is given.
        type_name: of data, its type's name; empty: any.
    """

    owner: str
    name: str
    purpose: str
    kind: Kind
    parameters: tuple[str, ...] | None = None
    type_name: str = ""

    @property
    def path(self) -> str:
        """Such as ``torch._C._current_graph_task_id``."""
        return f"{self.owner}.{self.name}"

    @property
    def library(self) -> str:
        """The package that has to be installed."""
        return self.owner.partition(".")[0]


def _called(owner: str, name: str, parameters: str | None, purpose: str) -> UpstreamName:
    return UpstreamName(
        owner, name, purpose, "called", None if parameters is None else tuple(parameters.split())
    )


def _replaced(owner: str, name: str, parameters: str | None, purpose: str) -> UpstreamName:
    return UpstreamName(
        owner, name, purpose, "replaced", None if parameters is None else tuple(parameters.split())
    )


def _data(owner: str, names: str, purpose: str, type_name: str = "") -> Iterator[UpstreamName]:
    for name in names.split():
        yield UpstreamName(owner, name, purpose, "data", type_name=type_name)


def _each(
    kind: Literal["called", "class", "module"], owner: str, names: str, purpose: str
) -> Iterator[UpstreamName]:
    for name in names.split():
        yield UpstreamName(owner, name, purpose, kind)


_FAKE = "torch._subclasses.fake_tensor"
_DISPATCH = "torch.utils._python_dispatch"
_ATEN = "torch.ops.aten"

TORCH = (
    # Autograd.
    _called("torch._C", "_current_graph_task_id", None, "whether a backward pass runs, and which"),
    _called("torch._C", "_current_autograd_node", None, "whose gradient is computed: what memory is for"),
    _called("torch.autograd", "_get_sequence_nr", "", "which operator of the forward pass a node belongs to"),
    _called("torch.autograd.graph.Node()", "_sequence_nr", None, "the other side of it"),
    _called(
        "torch.autograd.graph",
        "_engine_run_backward",
        "t_outputs",
        "no other Python lies between engine and mode",
    ),
    *_each(
        "module",
        "torch",
        "_compile _ops",
        "files whose frames lie around a dispatch mode's and are passed over",
    ),
    *_each("module", "torch._dynamo", "eval_frame", "the same"),
    # Tensors and storages.
    *_data(
        "torch.UntypedStorage", "_cdata", "which storage it is, whatever tensor shows it", "getset_descriptor"
    ),
    *_data(
        "torch.Tensor",
        "_version",
        "whether a tensor on its way to the host was written to",
        "getset_descriptor",
    ),
    _called("torch.Tensor", "_is_view", None, "autocast keeps casts of weights, not of their views"),
    _called(
        "torch.Tensor",
        "_use_count",
        None,
        "whether the engine alone holds a gradient: bytes counted, no number",
    ),
    _called("torch._C", "_storage_Use_Count", None, "the same of its storage"),
    _called("torch._C", "_swap_tensor_impl", None, "puts one fake tensor in another's place"),
    _called(
        "torch", "_has_compatible_shallow_copy_type", None, "whether `parameter.data = tensor` can be said"
    ),
    _called("torch", "_assert_async", None, "labels out of the vocabulary, without waiting for the device"),
    # Modules and schedules.
    *_data("torch.nn.Module()", "_parameters _buffers", "puts another tensor under a weight's name", "dict"),
    *_data(
        "torch.optim.lr_scheduler.LRScheduler()",
        "_step_count",
        "part of its state: no warning on resume",
        "int",
    ),
    *_data(
        "torch.optim.optimizer", "_foreach_supported_types", "fused optimizers take fake tensors too", "list"
    ),
    *_data("torch.utils._foreach_utils", "_foreach_supported_types", "the same for clipping", "list"),
    *_each("module", "torch.utils", "_foreach_utils", "see the row above"),
    *_data(
        "torch.backends.cuda.matmul",
        "allow_bf16_reduced_precision_reduction_split_k allow_fp16_reduced_precision_reduction_split_k",
        "sums of gradients in float32",
        "bool",
    ),
    # Fake tensors and dispatch.
    *_each("class", _FAKE, "FakeTensor FakeTensorMode", "what a trace runs on"),
    *_each(
        "class",
        _FAKE,
        "DataDependentOutputException DynamicOutputShapeException",
        "an operator that asks for values",
    ),
    *_each("class", _FAKE, "UnsupportedOperatorException", "an operator without a fake rule"),
    *_each("called", _FAKE, "unset_fake_temporarily", "real tensors within a trace"),
    *_data(
        f"{_FAKE}.FakeTensorMode()",
        "cache_enabled avoid_device_init",
        "two of its settings, which ours decides",
        "bool",
    ),
    *_data(
        f"{_FAKE}.FakeTensorMode()",
        "in_kernel_invocation _allow_unsafe_data_ptr_access",
        "views are made without it",
        "bool",
    ),
    _called(
        "torch.Tensor", "_make_subclass", None, "makes a fake tensor of a meta one, as torch's own code does"
    ),
    _called(
        "torch._C", "_dispatch_keys", None, "whether two tensors are of a kind: conjugated, of inference mode"
    ),
    _called("torch._C", "_set_meta_in_tls_dispatch_include", None, "kernels without values, on fake tensors"),
    _called("torch._C", "_set_throw_on_mutable_data_ptr", None, "as torch guards a fake tensor's address"),
    _called("torch._C", "_set_warn_deprecated_on_mutable_data_ptr", None, "the same"),
    *_each(
        "class", "torch._C", "_DisableTorchDispatch _PreserveDispatchKeyGuard", "a kernel without any mode"
    ),
    *_each("class", _DISPATCH, "TorchDispatchMode", "sees every operator"),
    *_each("called", _DISPATCH, "_disable_current_modes", "steps outside of all modes"),
    _called("torch._C", "_get_dispatch_mode", None, "whether a thread is the one that is traced"),
    *_each("class", "torch._C", "_TorchDispatchModeKey", "the key to ask for"),
    *_each(
        "class",
        "torch._C",
        "_AutoDispatchBelowAutograd _ExcludeDispatchKeyGuard",
        "kernels whose own calls skip a key",
    ),
    _called("torch._C", "_dispatch_key_parse", None, "such a key by its name"),
    _called(
        "torch._C", "_dispatch_get_all_op_names", None, "which operators CUDA's autocast knows in this torch"
    ),
    _called("torch._C", "_dispatch_has_kernel_for_dispatch_key", None, "which operators have a kernel"),
    *_each("class", "torch._ops", "OpOverload", "operators as a dispatch mode gets them"),
    *_data(
        "torch._ops.OpOverload()", "_schema", "names of arguments, and which it writes to", "FunctionSchema"
    ),
    *_data("torch._ops.OpOverload()", "_opname", "the operator's name in logs of work", "str"),
    _called("torch.utils._pytree", "tree_leaves", "tree", "tensors within arguments"),
    _called("torch.utils._pytree", "tree_map", "func tree", "known values within arguments"),
    # Devices and processes.
    _called(
        "torch.utils.backend_registration",
        "_setup_privateuseone_for_python_backend",
        "rename * backend_module",
        "makes the device type of the virtual GPU",
    ),
    _called(
        "torch.cuda._utils",
        "_get_device_index",
        "device * optional",
        "refuses what torch.cuda refuses, in its words",
    ),
    _called("torch._C", "_get_sdp_priority_order", None, "the order in which attention kernels are tried"),
    _called(
        "torch.distributed.distributed_c10d", "_get_default_store", "", "one process of many prints an error"
    ),
    _replaced(
        "torch.utils.data._utils.worker",
        "_worker_loop",
        None,  # torch 2.14 calls one of them otherwise
        "processes of a data loader make real tensors",
    ),
    *_each("module", "torch.utils.data._utils", "worker", "see the row above"),
    _replaced(
        "torch.nn.attention.flex_attention", "_validate_device", "query key value", "refuses FlexAttention"
    ),
    *_each("called", "torch.cuda.memory", "_dump_snapshot", "refused by name"),
    _called(
        "torch.cuda.memory", "_snapshot", "", "what a recording writes; refused by name on a virtual GPU"
    ),
    _called(
        "torch.cuda.memory",
        "_record_memory_history",
        "* enabled context stacks max_entries clear_history",
        "the same",
    ),
    *_each("called", "torch.cuda.jiterator", "_create_jit_fn _create_multi_output_jit_fn", "refused by name"),
    _replaced("torch.cuda", "_sleep", "cycles", "a kernel that waits"),
    *_each("module", "torch.cuda", "_memory_viz", "its viewer reads what a trace's snapshot writes"),
)

OPERATORS = (
    _called(
        _ATEN,
        "_fused_adamw_",
        "self grads exp_avgs exp_avg_sqs max_exp_avg_sqs state_steps * lr beta1 beta2 weight_decay eps amsgrad "
        "maximize",
        "torch's AdamW on a chunk of float32 tensors, in one kernel",
    ),
    _called(
        _ATEN,
        "_flash_attention_forward",
        "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask * scale "
        "window_size_left window_size_right",
        "flash-attn's kernel, which torch has as well",
    ),
    _called(
        _ATEN,
        "_scaled_dot_product_flash_attention",
        "query key value dropout_p is_causal return_debug_mask * scale",
        "attention as CUDA takes it",
    ),
    _called(
        _ATEN,
        "_scaled_dot_product_cudnn_attention",
        "query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask * scale",
        "attention as CUDA takes it",
    ),
    _called(
        _ATEN,
        "_scaled_dot_product_efficient_attention",
        "query key value attn_bias compute_log_sumexp dropout_p is_causal * scale",
        "attention as CUDA takes it",
    ),
    _called(
        _ATEN,
        "_scaled_dot_product_attention_math",
        "query key value attn_mask dropout_p is_causal dropout_mask * scale enable_gqa",
        "attention as CUDA takes it",
    ),
    _called(_ATEN, "_softmax", "self dim half_to_float", "CUDA's kernel reads float16 itself; its buffers"),
    _called(
        _ATEN, "_log_softmax", "self dim half_to_float", "CUDA's kernel reads float16 itself; its buffers"
    ),
    _called(_ATEN, "_softmax_backward_data", "* grad_output output", "buffers of its CUDA kernel"),
    _called(_ATEN, "_log_softmax_backward_data", "* grad_output output", "buffers of its CUDA kernel"),
    *_each(
        "called",
        _ATEN,
        "_flash_attention_backward _foreach_norm _index_put_impl_",
        "buffers of their CUDA kernels",
    ),
    *_each(
        "called",
        _ATEN,
        "_scaled_dot_product_flash_attention_backward _scaled_dot_product_cudnn_attention_backward "
        "_scaled_dot_product_efficient_attention_backward",
        "buffers of their CUDA kernels",
    ),
    _called(_ATEN, "_to_copy", "self * dtype device", "copies over the host link"),
    _called(_ATEN, "_local_scalar_dense", "self", "a program that reads a value waits for the device"),
    _called(_ATEN, "_pin_memory", "self", "memory that is pinned"),
    _called(
        _ATEN, "_unique2", "self sorted return_inverse return_counts", "a result whose size depends on values"
    ),
    *_each("called", _ATEN, "_unsafe_view", "moves no byte"),
    *_each("called", _ATEN, "_fused_sgd_ _fused_adagrad_", "fused steps that torch has no fake rule for"),
    *_each(
        "called",
        _ATEN,
        "_convolution _cudnn_rnn _thnn_fused_lstm_cell _thnn_fused_gru_cell",
        "in the list of what autocast computes in 16 bits",
    ),
)

_FLASH = "transformers.modeling_flash_attention_utils"
_MODEL = "transformers.modeling_utils.PreTrainedModel"

TRANSFORMERS = (
    _replaced(
        "transformers.utils.import_utils", "is_fake_tensor", "x", "masks and kernels as with real tensors"
    ),
    _replaced(
        _FLASH,
        "_lazy_imports",
        "implementation attention_wrapper allow_all_kernels",
        "flash-attn without having it: five functions, the last two those of the row below",
    ),
    _called(
        _FLASH,
        "_flash_attention_forward",
        "query_states key_states value_states attention_mask query_length is_causal",
        "put where three architectures would have imported it",
    ),
    _called(_FLASH, "_pad_input", "hidden_states indices batch seqlen", "handed back to transformers"),
    _called(_FLASH, "_unpad_input", "hidden_states attention_mask", "handed back to transformers"),
    *_data(_FLASH, "_loaded_implementation", "None: what is loaded is asked for again"),
    _replaced(
        _MODEL,
        "_flash_attn_can_dispatch",
        "self flash_attn_version is_init_check",
        "flash-attn without having it",
    ),
    *_data(
        _MODEL,
        "_supports_flash_attn _supports_sdpa _supports_flex_attn",
        "which attention kernels a model takes",
        "bool",
    ),
    *_data(
        "transformers.PretrainedConfig", "_attn_implementation", "which one it was loaded with", "property"
    ),
    *_data(
        "transformers.modeling_layers.GradientCheckpointingLayer()",
        "_gradient_checkpointing_func",
        "how a layer is recomputed. Up to 5.22 layers checkpoint their `__call__`, in 5.23 their `forward`; vertical "
        "order asks which",
    ),
    _replaced(
        "transformers.integrations.moe",
        "_can_use_grouped_mm",
        "input weight offs",
        "experts multiplied as on CUDA",
    ),
    _replaced(
        "transformers.core_model_loading",
        "_materialize_copy",
        "tensor device dtype",
        "a checkpoint's shapes instead of its values",
    ),
    *_data(
        "transformers.modeling_utils", "str_to_torch_dtype", "dtypes of safetensors by their names", "dict"
    ),
    _replaced(
        "transformers.modeling_utils",
        "_get_resolved_checkpoint_files",
        None,
        "a script's weights stay on the hub",
    ),
    _replaced(
        "transformers.modeling_utils",
        "_get_dtype",
        "dtype checkpoint_files config sharded_metadata state_dict weights_only hf_quantizer",
        "the type of weights that are not read",
    ),
    _replaced(
        _MODEL,
        "_load_pretrained_model",
        "model state_dict checkpoint_files load_config expected_keys",
        "shapes in place of weights",
    ),
    _replaced(
        "transformers.generation.utils.GenerationMixin",
        "_beam_search_has_unfinished_sequences",
        "is_early_stop_heuristic_unsatisfied is_sent_finished next_token_hits_stopping_criteria early_stopping",
        "beam search to its length",
    ),
    _replaced(
        "transformers.generation.utils.GenerationMixin",
        "_update_finished_beams",
        "self sequences topk_running_sequences beam_scores topk_log_probs beam_indices topk_running_beam_indices "
        "is_early_stop_heuristic_unsatisfied is_sent_finished next_token_hits_stopping_criteria top_num_beam_mask "
        "num_beams cur_len decoder_prompt_len length_penalty early_stopping",
        "how long the result of a beam search is",
    ),
    _replaced(
        "transformers.Trainer",
        "_save_checkpoint",
        "self model trial",
        "weights and state are at rest meanwhile",
    ),
    _replaced(
        "transformers.Trainer", "_load_from_checkpoint", "self resume_from_checkpoint model", "the same"
    ),
    _replaced("transformers.Trainer", "_load_best_model", "self", "the same"),
    *(
        _replaced(
            "transformers.Trainer", name, "self output_dir", "a checkpoint is whole before it has its name"
        )
        for name in ("_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state")
    ),
    _called("transformers.Trainer", "_get_output_dir", "self trial", "where its checkpoints are"),
    _replaced("transformers.Trainer", "_load_optimizer_and_scheduler", "self checkpoint", "the same"),
    *_data(
        "transformers.AutoModelForCausalLM",
        "_model_mapping",
        "whether a config has a causal LM",
        "_LazyAutoMapping",
    ),
)

ACCELERATE = (
    *_data("accelerate.state.PartialState", "_shared_state", "its device is chosen anew in a trace", "dict"),
    *_data("accelerate.state.AcceleratorState", "_shared_state", "the same", "dict"),
    *_data("accelerate.state.GradientState", "_shared_state", "the same", "dict"),
    _called(
        "accelerate.state.AcceleratorState",
        "_reset_state",
        "",
        "of an Accelerator that has a precision",
    ),
    *_data("accelerate.Accelerator().prepare()", "_is_accelerate_prepared", "its mark is taken off", "bool"),
    *_data(
        "accelerate.Accelerator().prepare()", "_original_forward", "what it put around forward goes", "method"
    ),
)

PEFT = (
    _replaced(
        "peft.tuners.lora.LoraLayer",
        "_get_base_layer_device_and_dtype",
        "self base_layer",
        "adapters are made in float32, not rounded to their layer's type",
    ),
    _replaced(
        "peft.tuners.lora.LoraLayer", "_cast_input_dtype", "self x dtype", "leaves the type to autocast"
    ),
)

_FUNCTIONAL = "bitsandbytes.functional"

BITSANDBYTES = (
    *_data(_FUNCTIONAL, "name2qmap", "tables kept for the process must not be fake", "dict"),
    *_data(f"{_FUNCTIONAL}.GlobalPageManager", "_instance", "nor its pages"),
    _replaced(
        _FUNCTIONAL, "create_dynamic_map", "signed max_exponent_bits total_bits", "reads the table it makes"
    ),
    _replaced(_FUNCTIONAL, "get_paged", "shape dtype device", "asks CUDA for managed memory"),
    _replaced(_FUNCTIONAL, "fill", "A value device prefetch", "calls CUDA by address"),
    _replaced(_FUNCTIONAL, "prefetch_tensor", "A to_cpu", "calls CUDA by address"),
    _replaced("bitsandbytes.optim.optimizer", "sync_gpu", "t", "waits for the device by CUDA's own call"),
    *_each("called", "bitsandbytes.nn.Params4bit", "__new__", "takes fake tensors too"),
    *_each("called", "bitsandbytes.nn.Int8Params", "__new__", "takes fake tensors too"),
    *_each("module", "bitsandbytes.autograd", "_functions", "its logger is quiet"),
)

DATASETS = (*_data("datasets.Dataset()", "_fingerprint", "the tokenized rows' place in the cache", "str"),)

TRL = (
    _replaced(
        "trl.trainer.grpo_trainer.GRPOTrainer",
        "_generate_single_turn",
        None,  # they differ between its versions
        "completions without generating them",
    ),
    *(
        row
        for module in ("chunked_logprob", "chunked_divergence")
        for row in (
            _replaced(
                f"trl.kernels.{module}", "_use_triton", "device", "its way over Triton, without having it"
            ),
            _replaced(
                f"trl.kernels.{module}", "_addmm_fp32", "acc a b", "products that CUDA sums in float32"
            ),
            *_data(f"trl.kernels.{module}", "_MM_OUT_DTYPE", "whether it knows those products", "bool"),
            *_data(f"trl.kernels.{module}", "_backward_kernel", "a pass over tiles of logits"),
        )
    ),
    _replaced("trl.trainer.utils", "_use_triton", "device", "which positions are scored"),
    *_data("trl.kernels.chunked_logprob", "_forward_kernel", "a pass over a tile of logits"),
    *_data("trl.kernels.chunked_divergence", "_stats_kernel _jsd_kernel", "passes over tiles of logits"),
)

NAMES: tuple[UpstreamName, ...] = (
    *TORCH,
    *OPERATORS,
    *TRANSFORMERS,
    *ACCELERATE,
    *PEFT,
    *BITSANDBYTES,
    *DATASETS,
    *TRL,
)
