"""Every undocumented name of another library that the package relies on, listed under its owner.

``tests/foundation/upstream`` compares the list with the installed libraries and the sources with the list: a name that
a library renames fails, and so does a new one that is missing here. To find where a name is used, search for it. An
attribute that objects get when they are made is listed under the class, or the module, whose source sets it.
"""

from __future__ import annotations

NAMES_OF = {
    # _current_graph_task_id: whether a backward pass runs, and which
    # _current_autograd_node: whose gradient is computed: what memory is for
    # _storage_Use_Count: the same of its storage
    # _swap_tensor_impl: puts one fake tensor in another's place
    # _dispatch_keys: whether two tensors are of a kind: conjugated, of inference mode
    # _set_meta_in_tls_dispatch_include: kernels without values, on fake tensors
    # _set_throw_on_mutable_data_ptr: as torch guards a fake tensor's address
    # _set_warn_deprecated_on_mutable_data_ptr: the same
    # _DisableTorchDispatch, _PreserveDispatchKeyGuard: a kernel without any mode
    # _get_dispatch_mode: whether a thread is the one that is traced
    # _TorchDispatchModeKey: the key to ask for
    # _AutoDispatchBelowAutograd, _ExcludeDispatchKeyGuard: kernels whose own calls skip a key
    # _dispatch_key_parse: such a key by its name
    # _dispatch_get_all_op_names: which operators CUDA's autocast knows in this torch
    # _dispatch_has_kernel_for_dispatch_key: which operators have a kernel
    # _get_sdp_priority_order: the order in which attention kernels are tried
    # _distributed_c10d: the module of the row below
    # _get_accelerator, _accelerator_getAccelerator: the accelerator, which a machine without a GPU does not have
    "torch._C": (
        "_get_accelerator _accelerator_getAccelerator "
        "_current_graph_task_id _current_autograd_node _storage_Use_Count _swap_tensor_impl _dispatch_keys "
        "_set_meta_in_tls_dispatch_include _set_throw_on_mutable_data_ptr "
        "_set_warn_deprecated_on_mutable_data_ptr _DisableTorchDispatch _PreserveDispatchKeyGuard "
        "_get_dispatch_mode _TorchDispatchModeKey _AutoDispatchBelowAutograd _ExcludeDispatchKeyGuard "
        "_dispatch_key_parse _dispatch_get_all_op_names _dispatch_has_kernel_for_dispatch_key "
        "_get_sdp_priority_order _len_torch_dispatch_stack _distributed_c10d"
    ),
    # The work of a collective without peers
    "torch._C._distributed_c10d": "FakeWork",
    # _top_saved_tensors_default_hooks: whether a checkpoint takes what a layer saves
    # DeviceType: the type that the guard is asked for
    "torch._C._autograd": "_top_saved_tensors_default_hooks DeviceType",
    # _get_sequence_nr: which operator of the forward pass a node belongs to
    # _engine_run_backward: raises what a hook has raised
    "torch.autograd": "_get_sequence_nr _engine_run_backward",
    # The same of a node
    "torch.autograd.graph.Node": "_sequence_nr",
    # Passes of functions in Python are counted
    "torch.autograd.function.Function": "apply",
    # Backward passes of functions in Python are counted; the second is the name in later versions
    "torch.autograd.function.BackwardCFunction": "apply apply_boxed",
    # Calls of hooks are counted
    "torch.autograd.graph.saved_tensors_hooks": "__init__",
    # The modes of selective checkpointing
    "torch.utils.checkpoint": "_CachingTorchDispatchMode _CachedTorchDispatchMode",
    # Its calls are counted
    "torch.utils.checkpoint._CachingTorchDispatchMode": "__torch_dispatch__",
    # Its calls are counted
    "torch.utils.checkpoint._CachedTorchDispatchMode": "__torch_dispatch__",
    # There is no other Python between engine and mode
    "torch.autograd.graph": "_engine_run_backward",
    # _compile, _ops: files whose frames lie around a dispatch mode's and are passed over
    # _has_compatible_shallow_copy_type: whether `parameter.data = tensor` can be said
    # _assert_async: labels out of the vocabulary, without waiting for the device
    # _foreach_norm, _foreach_mul_: many gradients in a few launches
    "torch": "_compile _ops _has_compatible_shallow_copy_type _assert_async _foreach_norm _foreach_mul_",
    # Its frames are passed over, too
    "torch._dynamo": "eval_frame",
    # Which storage it is, whatever tensor shows it
    "torch.UntypedStorage": "_cdata",
    # Which generator an operator has been given
    "torch.Generator": "_cdata",
    # _version: whether a tensor on its way to the host was written to
    # _backward_hooks, _post_accumulate_grad_hooks: stay with a fake tensor that moves to another device
    # _is_view: autocast keeps casts of weights, not of their views
    # _use_count: whether the engine alone holds a gradient: bytes counted, no number
    # _make_subclass: makes a fake tensor of a meta one, as torch's own code does
    "torch.Tensor": (
        "_version _backward_hooks _post_accumulate_grad_hooks _is_view _use_count _make_subclass"
    ),
    # Which functions a default device is for: remembered from the first call on
    "torch.utils._device": "_device_constructors",
    # _apply: whose calls of `swap_tensors` stand for `parameter.data = moved`
    # _compiled_call_impl: None: it is not compiled in place
    # _parameters, _buffers: puts another tensor under a weight's name
    # _forward_hooks, _forward_pre_hooks: which hooks a slow module has
    # _modules: a copy of an MLP gets narrower layers
    "torch.nn.Module": (
        "_apply _compiled_call_impl _parameters _buffers _forward_hooks _forward_pre_hooks _modules"
    ),
    # _torchdynamo_orig_callable: which forward passes are compiled
    # _orig_mod: what a compiled module was
    "torch._dynamo.eval_frame": "_torchdynamo_orig_callable _orig_mod",
    # Part of its state: no warning on resume
    "torch.optim.lr_scheduler.LRScheduler": "_step_count",
    # Fused optimizers take fake tensors too
    "torch.optim.optimizer": "_foreach_supported_types",
    # Clipping takes fake tensors, too
    "torch.utils._foreach_utils": "_foreach_supported_types",
    # The module of the row above
    "torch.utils": "_foreach_utils",
    # Sums of gradients in float32
    "torch.backends.cuda.matmul": (
        "allow_bf16_reduced_precision_reduction_split_k allow_fp16_reduced_precision_reduction_split_k"
    ),
    # FakeTensor, FakeTensorMode: what a trace runs on
    # DataDependentOutputException, DynamicOutputShapeException: an operator that asks for values
    # UnsupportedOperatorException: an operator without a fake rule
    # unset_fake_temporarily: real tensors within a trace
    "torch._subclasses.fake_tensor": (
        "FakeTensor FakeTensorMode DataDependentOutputException DynamicOutputShapeException "
        "UnsupportedOperatorException unset_fake_temporarily"
    ),
    # cache_enabled, avoid_device_init: two of its settings, which ours decides
    # in_kernel_invocation, _allow_unsafe_data_ptr_access: views are made without it
    "torch._subclasses.fake_tensor.FakeTensorMode": (
        "cache_enabled avoid_device_init in_kernel_invocation _allow_unsafe_data_ptr_access"
    ),
    # TorchDispatchMode: sees every operator
    # _disable_current_modes: steps outside of all modes
    # _push_mode, _pop_mode: tensors without values are traced in a worker's rows
    "torch.utils._python_dispatch": "TorchDispatchMode _disable_current_modes _push_mode _pop_mode",
    # Operators as a dispatch mode gets them
    "torch._ops": "OpOverload",
    # _schema: names of arguments, and which it writes to
    # _opname: the operator's name in logs of work
    "torch._ops.OpOverload": "_schema _opname",
    # tree_leaves: tensors within arguments
    # tree_map: known values within arguments
    "torch.utils._pytree": "tree_leaves tree_map",
    # Makes the device type of the virtual GPU
    "torch.utils.backend_registration": "_setup_privateuseone_for_python_backend",
    # Its guard, which takes the exceptions of hooks
    "torch._C._acc": "DeviceGuard",
    # Refuses what torch.cuda refuses, in its words
    "torch.cuda._utils": "_get_device_index",
    # _compute_bucket_assignment_by_size: DDP's buckets in a trace, as they are from the second step on
    # _DEFAULT_FIRST_BUCKET_BYTES: of those buckets, the first
    "torch.distributed": "_compute_bucket_assignment_by_size _DEFAULT_FIRST_BUCKET_BYTES",
    # Ranks compare their weights' shapes by values
    "torch.nn.parallel.distributed": "_verify_param_shape_across_processes",
    # Runs what is queued as the end of a backward pass
    "torch.autograd.Variable": "_execution_engine",
    # What a config file sets for a launch
    "accelerate.commands.launch": "_validate_launch_command",
    # Their order, which ranks agree on by values
    "torch.distributed.Reducer": "_rebuild_buckets",
    # The package of the row below
    "torch.testing": "_internal",
    # One process of several, without the others
    "torch.testing._internal.distributed": "fake_pg",
    # _new_process_group_helper: a process group of one needs no NCCL
    # _get_default_store: one process of many prints an error
    # _resolve_process_group: how many processes one of DTensor's collectives is for
    # _coalescing_manager: the sums of several gradients in one collective
    # _abort_process_group: leaves a group of which a process may be dead
    "torch.distributed.distributed_c10d": (
        "_new_process_group_helper _get_default_store _resolve_process_group _coalescing_manager "
        "_abort_process_group"
    ),
    # Packs and pads rows without reading their memory
    "torch._VF": "_pack_padded_sequence _pad_packed_sequence",
    # What recurrent layers hand to their kernel, in order
    "torch.nn.RNNBase": "_flat_weights _flat_weights_names",
    # The module of the row below
    "torch.distributed.fsdp": "_init_utils",
    # FSDP1's device of a rank, which is the virtual one
    "torch.distributed.fsdp._init_utils": "_get_device_from_device_id",
    # Where DTensor keeps the states of random numbers
    "torch.distributed.tensor": "_random",
    # What keeps them, for one device and for good: a virtual one's is not left behind
    "torch.distributed.tensor._random": "_rng_tracker",
    # The module of the row below
    "torch._prims": "rng_prims",
    # An operator on a part of a DTensor, recorded
    "torch._prims.rng_prims": "run_dtensor_rng_op",
    # What FSDP2 knows of a module
    "torch.distributed.fsdp.FSDPModule": "_get_fsdp_state",
    # _lazy_init: makes the model the root, whatever part of it runs first
    # _fsdp_param_group: the parameters that are gathered together
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState": "_lazy_init _fsdp_param_group",
    # _orig_dtype: the type that summed gradients are rounded to
    # _fsdp_params_with_wider_grad_dtype: the parameters whose first gradient keeps its own type
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup": (
        "_orig_dtype _fsdp_params_with_wider_grad_dtype"
    ),
    # Workers of a data loader work here
    "torch.utils.data.DataLoader": "_get_iterator",
    # _dataset_fetcher: what fetches a batch
    # _reset: begins an epoch; ours is called
    "torch.utils.data.dataloader._SingleProcessDataLoaderIter": "_dataset_fetcher _reset",
    # A worker's information
    "torch.utils.data._utils": "worker",
    # What the worker's rows see of it
    "torch.utils.data._utils.worker": "_worker_info",
    # Refuses FlexAttention
    "torch.nn.attention.flex_attention": "_validate_device",
    # _dump_snapshot: refused by name
    # _snapshot: what a recording writes; refused by name on a virtual GPU
    # _record_memory_history: the same
    "torch.cuda.memory": "_dump_snapshot _snapshot _record_memory_history",
    # Refused by name
    "torch.cuda.jiterator": "_create_jit_fn _create_multi_output_jit_fn",
    # _sleep: a kernel that waits
    # _memory_viz: its viewer reads what a trace's snapshot writes
    "torch.cuda": "_sleep _memory_viz",
    # What FSDP2 exchanges: bytes on the clock, buffers in the timeline
    "torch.ops.c10d": "_allgather_base_ _reduce_scatter_base_",
    # What DTensor exchanges: bytes on the clock, results in the timeline
    "torch.ops": "_c10d_functional",
    # _thnn_fused_gru_cell_backward, _ctc_loss, _ctc_loss_backward, _pack_padded_sequence, _cudnn_ctc_loss,
    # _cudnn_rnn_backward, _standard_gamma_grad, _sample_dirichlet, _dirichlet_grad: operators with a rule of ours, as
    # torch has none
    # _fused_adamw_: torch's AdamW on a chunk of float32 tensors, in one kernel
    # _flash_attention_forward: flash-attn's kernel, which torch has as well
    # _scaled_dot_product_flash_attention, _scaled_dot_product_cudnn_attention,
    # _scaled_dot_product_efficient_attention, _scaled_dot_product_attention_math: attention as CUDA takes it
    # _softmax, _log_softmax: CUDA's kernel reads float16 itself; its buffers
    # _softmax_backward_data, _log_softmax_backward_data: buffers of its CUDA kernel
    # _flash_attention_backward, _foreach_norm, _index_put_impl_, _scaled_dot_product_flash_attention_backward,
    # _scaled_dot_product_cudnn_attention_backward, _scaled_dot_product_efficient_attention_backward: buffers of their
    # CUDA kernels
    # _unsafe_index_put: what it writes has one type
    # _to_copy: copies over the host link
    # _local_scalar_dense: a program that reads a value waits for the device
    # _pin_memory: memory that is pinned
    # _unique2: a result whose size depends on values
    # _unsafe_view: moves no byte
    # _fused_sgd_, _fused_adagrad_: fused steps that torch has no fake rule for
    # _fused_adam, _fused_sgd, _fused_adagrad: the beginnings of fused steps' names, for the clock
    # _convolution, _cudnn_rnn, _thnn_fused_lstm_cell, _thnn_fused_gru_cell: in the list of what autocast computes in
    # 16 bits
    # _foreach_copy_, _scaled_mm, _amp_foreach_non_finite_check_and_unscale_, _fused_adam_: what CUDA refuses of a
    # call
    "torch.ops.aten": (
        "_thnn_fused_gru_cell_backward _ctc_loss _ctc_loss_backward _pack_padded_sequence _cudnn_ctc_loss "
        "_cudnn_rnn_backward _standard_gamma_grad _sample_dirichlet _dirichlet_grad _fused_adamw_ "
        "_flash_attention_forward _scaled_dot_product_flash_attention _scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_attention_math _softmax _log_softmax "
        "_softmax_backward_data _log_softmax_backward_data _flash_attention_backward _foreach_norm "
        "_index_put_impl_ _unsafe_index_put _scaled_dot_product_flash_attention_backward "
        "_scaled_dot_product_cudnn_attention_backward _scaled_dot_product_efficient_attention_backward "
        "_to_copy _local_scalar_dense _pin_memory _unique2 _unsafe_view _fused_sgd_ _fused_adagrad_ "
        "_convolution _cudnn_rnn _thnn_fused_lstm_cell _thnn_fused_gru_cell _foreach_copy_ _scaled_mm "
        "_amp_foreach_non_finite_check_and_unscale_ _fused_adam_ _fused_adam _fused_sgd _fused_adagrad"
    ),
    # Buffers of its CUDA kernel
    "torch.ops.torch_attn": "_varlen_attn_backward",
    # Masks and kernels as with real tensors
    "transformers.utils.import_utils": "is_fake_tensor",
    # _lazy_imports: flash-attn without having it: five functions, the last two those that pad
    # _flash_attention_forward: put where three architectures would have imported it
    # _pad_input, _unpad_input: handed back to transformers
    # _loaded_implementation: None: what is loaded is asked for again
    "transformers.modeling_flash_attention_utils": (
        "_lazy_imports _flash_attention_forward _pad_input _unpad_input _loaded_implementation"
    ),
    # Its closures decide whose kernels a layer with a recurrent state calls
    "transformers.integrations.hub_kernels": "use_kernel_func_from_hub_with_fallback",
    # _flash_attn_can_dispatch: flash-attn without having it
    # _keys_to_ignore_on_save: what save_pretrained leaves out
    # _supports_flash_attn, _supports_sdpa, _supports_flex_attn, _supports_attention_backend: which attention kernels
    # a model takes
    # _keep_in_fp32_modules: weights that no quantiser packs
    # _load_pretrained_model: shapes in place of weights
    # _is_stateful: whether layers are recurrent
    "transformers.modeling_utils.PreTrainedModel": (
        "_is_stateful _flash_attn_can_dispatch _keys_to_ignore_on_save _supports_flash_attn _supports_sdpa "
        "_supports_flex_attn _supports_attention_backend _keep_in_fp32_modules _load_pretrained_model"
    ),
    # Which one it was loaded with
    "transformers.PretrainedConfig": "_attn_implementation",
    # How a layer is recomputed. Up to 5.22 layers checkpoint their `__call__`, in 5.23 their `forward`: a technique
    # that calls layers itself asks which
    "transformers.modeling_layers": "_gradient_checkpointing_func",
    # _grouped_mm: each expert's rows by its weight
    # _can_use_grouped_mm: experts multiplied as on CUDA
    "transformers.integrations.moe": "_grouped_mm _can_use_grouped_mm",
    # A family's own gate, between the products of experts
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts": "_apply_gate",
    # _materialize_copy: a checkpoint's shapes instead of its values
    # _weight_conversions: taken off: a model that was unpacked is saved unpacked
    "transformers.core_model_loading": "_materialize_copy _weight_conversions",
    # str_to_torch_dtype: dtypes of safetensors by their names
    # _get_resolved_checkpoint_files: a script's weights stay on the hub
    # _get_dtype: the type of weights that are not read
    # _is_hf_initialized: packed experts have no tensors to initialise
    "transformers.modeling_utils": (
        "str_to_torch_dtype _get_resolved_checkpoint_files _get_dtype _is_hf_initialized"
    ),
    # _beam_search_has_unfinished_sequences: beam search to its length
    # _update_finished_beams: how long the result of a beam search is
    # _sample: decodes a few tokens
    # _has_unfinished_sequences: where its next token begins
    # _update_model_kwargs_for_generation: takes up those left out
    "transformers.generation.utils.GenerationMixin": (
        "_beam_search_has_unfinished_sequences _update_finished_beams _sample _has_unfinished_sequences "
        "_update_model_kwargs_for_generation"
    ),
    # _save_checkpoint: weights and state are at rest meanwhile
    # _load_from_checkpoint, _load_best_model, _load_optimizer_and_scheduler: the same
    # _save_optimizer_and_scheduler, _save_scaler, _save_rng_state: a checkpoint is whole before it has its name
    # _get_output_dir: where its checkpoints are
    "transformers.Trainer": (
        "_save_checkpoint _load_from_checkpoint _load_best_model _save_optimizer_and_scheduler _save_scaler "
        "_save_rng_state _get_output_dir _load_optimizer_and_scheduler"
    ),
    # Whether a config has a causal LM
    "transformers.AutoModelForCausalLM": "_model_mapping",
    # Its device is chosen again in a trace
    "accelerate.state.PartialState": "_shared_state",
    # _shared_state: the same
    # _reset_state: of an Accelerator that has a precision
    # _mixed_precision: with one, FSDP 2 would make trained weights float32
    "accelerate.state.AcceleratorState": "_shared_state _reset_state _mixed_precision",
    # As of the two above
    "accelerate.state.GradientState": "_shared_state",
    # _is_accelerate_prepared: its mark is taken off
    # _original_forward: what it put around forward goes
    "accelerate.Accelerator": "_is_accelerate_prepared _original_forward",
    # _get_base_layer_device_and_dtype: adapters are made in float32, not rounded to their layer's type
    # _cast_input_dtype: leaves the type to autocast
    # _disable_adapters, _active_adapter: read at each call, without properties around them
    "peft.tuners.lora.LoraLayer": (
        "_get_base_layer_device_and_dtype _cast_input_dtype _disable_adapters _active_adapter"
    ),
    # _MODEL_TO_CONVERSION_PATTERN: families whose experts it adapts
    # _MOE_TARGET_MODULE_MAPPING: names that it takes for their experts and routers
    "peft.utils.transformers_weight_conversion": "_MODEL_TO_CONVERSION_PATTERN _MOE_TARGET_MODULE_MAPPING",
    # name2qmap: tables kept for the process must not be fake
    # create_dynamic_map: reads the table it makes
    # get_paged: asks CUDA for managed memory
    # fill, prefetch_tensor: calls CUDA by address
    "bitsandbytes.functional": "name2qmap create_dynamic_map get_paged fill prefetch_tensor",
    # Its pages must not be fake
    "bitsandbytes.functional.GlobalPageManager": "_instance",
    # Waits for the device by CUDA's own call
    "bitsandbytes.optim.optimizer": "sync_gpu",
    # Takes fake tensors too
    "bitsandbytes.nn.Params4bit": "__new__",
    # Takes fake tensors too
    "bitsandbytes.nn.Int8Params": "__new__",
    # Its logger is quiet
    "bitsandbytes.autograd": "_functions",
    # The tokenized rows' place in the cache
    "datasets.Dataset": "_fingerprint",
    # Where ZeRO-2 keeps a parameter's float32 values and averages
    "deepspeed.utils.mixed_precision_linkage": "_hp_mapping",
    # A GPU is there without its driver
    "triton.runtime.driver.driver": "_active",
    # The variant that a launch has taken, launched again without a look at its arguments
    "triton.compiler.CompiledKernel": "__getitem__",
    # Configurations are not timed
    "triton.runtime.autotuner.Autotuner": "_bench",
    # It finds Triton, without having it
    "liger_kernel.backends.capability.Capability": "_evaluate",
    # Which of an architecture's modules get which operator
    "liger_kernel.transformers.monkey_patch": "MODEL_TYPE_TO_APPLY_LIGER_FN",
    # The gated activation of an MLP, which may be differentiated once
    "liger_kernel.transformers.swiglu": "_swiglu_dispatch",
    # The kernels that our functions launch, and their settings
    "liger_kernel.ops.rms_norm": "_rms_norm_forward_kernel _rms_norm_backward_kernel _block_rms_norm_forward_kernel "
    "_block_rms_norm_backward_kernel _str_to_casting_mode torch_to_triton_dtype calculate_settings",
    # The gated activation's, and when Liger cuts its rows
    "liger_kernel.ops.swiglu": "_swiglu_forward_kernel _swiglu_backward_kernel _should_tile _SWIGLU_TILE_MIN_BLOCK",
    # The rotary embedding's
    "liger_kernel.ops.rope": "_triton_rope",
    # The gated activation with GELU
    "liger_kernel.transformers.geglu": "LigerGELUMulFunction",
    # _init_vllm: vLLM itself does not start
    # _iter_named_params: what it would copy
    # _llm_weights_sleeping: whether it would have to
    "trl.generation.vllm_generation.VLLMGeneration": "_init_vllm _iter_named_params _llm_weights_sleeping",
    # _buffered_inputs: whether completions of a whole step are generated at once
    # _step: generates in a step of ours
    "trl.trainer.grpo_trainer.GRPOTrainer": "_buffered_inputs _step",
    # _use_triton: its way over Triton, without having it
    # _addmm_fp32: products that CUDA sums in float32
    # _MM_OUT_DTYPE: whether it knows those products
    # _backward_kernel: a pass over tiles of logits
    # _forward_kernel: a pass over a tile of logits
    "trl.kernels.chunked_logprob": ("_use_triton _addmm_fp32 _MM_OUT_DTYPE _backward_kernel _forward_kernel"),
    # _use_triton: its way over Triton, without having it
    # _addmm_fp32: products that CUDA sums in float32
    # _MM_OUT_DTYPE: whether it knows those products
    # _backward_kernel: a pass over tiles of logits
    # _stats_kernel, _jsd_kernel: passes over tiles of logits
    "trl.kernels.chunked_divergence": (
        "_use_triton _addmm_fp32 _MM_OUT_DTYPE _backward_kernel _stats_kernel _jsd_kernel"
    ),
    # _use_triton: which positions are scored
    # _CHUNKED_LOGPROB_CHUNK_SIZE: how wide a tile of logits is
    "trl.trainer.utils": "_use_triton _CHUNKED_LOGPROB_CHUNK_SIZE",
    # Its own open, to which files of a script are redirected
    "bz2": "_builtin_open",
    # How many tokens have logits at once
    "trl.trainer.sft_trainer": "_CHUNKED_LM_HEAD_CHUNK_SIZE",
}
"""The names, with what they are for above them."""

SINCE = {
    "torch.autograd.function.BackwardCFunction.apply_boxed": (2, 13),
    "torch._prims.rng_prims.run_dtensor_rng_op": (2, 13),
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._fsdp_params_with_wider_grad_dtype": (
        2,
        15,
    ),
    "trl.kernels": (1, 16),
    "trl.trainer.utils._use_triton": (1, 16),
    "trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE": (1, 15),
}
"""The first version of the library that has a name, or all below it; the package accepts older ones, too."""

BEFORE = {
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._orig_dtype": (2, 15),
    "trl.trainer.sft_trainer._CHUNKED_LM_HEAD_CHUNK_SIZE": (1, 15),
}
"""The first version without a name."""
