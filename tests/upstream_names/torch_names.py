"""Names of torch, except its operators."""

from __future__ import annotations

from upstream_names.upstream_name import UpstreamName, called, data, each, replaced

_FAKE = "torch._subclasses.fake_tensor"
_DISPATCH = "torch.utils._python_dispatch"

TORCH = (
    # Autograd.
    called("torch._C", "_current_graph_task_id", None, "whether a backward pass runs, and which"),
    called("torch._C", "_current_autograd_node", None, "whose gradient is computed: what memory is for"),
    called(
        "torch._C._autograd",
        "_top_saved_tensors_default_hooks",
        None,
        "whether a checkpoint takes what a layer saves",
    ),
    called("torch.autograd", "_get_sequence_nr", "", "which operator of the forward pass a node belongs to"),
    called("torch.autograd.graph.Node()", "_sequence_nr", None, "the other side of it"),
    replaced("torch.autograd.function.Function", "apply", None, "passes of functions in Python are counted"),
    replaced("torch.autograd.function.BackwardCFunction", "apply", None, "the same of backward passes"),
    UpstreamName(
        "torch.autograd.function.BackwardCFunction",
        "apply_boxed",
        "the same, by the name of later versions",
        "replaced",
        since=(2, 13),
    ),
    replaced(
        "torch.autograd.graph.saved_tensors_hooks",
        "__init__",
        "self pack_hook unpack_hook",
        "calls of hooks are counted",
    ),
    *each(
        "class",
        "torch.utils.checkpoint",
        "_CachingTorchDispatchMode _CachedTorchDispatchMode",
        "the modes of selective checkpointing",
    ),
    *(
        replaced(
            f"torch.utils.checkpoint.{mode}",
            "__torch_dispatch__",
            None,
            "so are its calls",
        )
        for mode in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
    ),
    called(
        "torch.autograd.graph",
        "_engine_run_backward",
        "t_outputs",
        "there is no other Python between engine and mode",
    ),
    replaced("torch.autograd", "_engine_run_backward", None, "raises what a hook has raised"),
    *each(
        "module",
        "torch",
        "_compile _ops",
        "files whose frames lie around a dispatch mode's and are passed over",
    ),
    *each("module", "torch._dynamo", "eval_frame", "the same"),
    # Tensors and storages.
    *data(
        "torch.UntypedStorage", "_cdata", "which storage it is, whatever tensor shows it", "getset_descriptor"
    ),
    *data("torch.Generator", "_cdata", "which generator an operator has been given", "member_descriptor"),
    *data(
        "torch.Tensor",
        "_version",
        "whether a tensor on its way to the host was written to",
        "getset_descriptor",
    ),
    *data(
        "torch.Tensor",
        "_backward_hooks _post_accumulate_grad_hooks",
        "stay with a fake tensor that moves to another device",
        "getset_descriptor",
    ),
    called("torch.Tensor", "_is_view", None, "autocast keeps casts of weights, not of their views"),
    called(
        "torch.Tensor",
        "_use_count",
        None,
        "whether the engine alone holds a gradient: bytes counted, no number",
    ),
    called("torch._C", "_storage_Use_Count", None, "the same of its storage"),
    called("torch._C", "_swap_tensor_impl", None, "puts one fake tensor in another's place"),
    called(
        "torch", "_has_compatible_shallow_copy_type", None, "whether `parameter.data = tensor` can be said"
    ),
    called(
        "torch.utils._device",
        "_device_constructors",
        "",
        "which functions a default device is for: remembered from the first call on",
    ),
    called("torch", "_assert_async", None, "labels out of the vocabulary, without waiting for the device"),
    # Modules and schedules.
    called(
        "torch.nn.Module()",
        "_apply",
        "fn",
        "whose calls of `swap_tensors` stand for `parameter.data = moved`",
    ),
    *data("torch.nn.Module()", "_compiled_call_impl", "None: it is not compiled in place", "NoneType"),
    *data("torch.compile(function)", "_torchdynamo_orig_callable", "which forward passes are compiled"),
    *data("torch.compile(module)", "_orig_mod", "what a compiled module was"),
    *data("torch.nn.Module()", "_parameters _buffers", "puts another tensor under a weight's name", "dict"),
    *data(
        "torch.nn.Module()",
        "_forward_hooks _forward_pre_hooks",
        "which hooks a slow module has",
        "OrderedDict",
    ),
    *data("torch.nn.Module()", "_modules", "a copy of an MLP gets narrower layers", "dict"),
    *data(
        "torch.optim.lr_scheduler.LRScheduler()",
        "_step_count",
        "part of its state: no warning on resume",
        "int",
    ),
    *data(
        "torch.optim.optimizer", "_foreach_supported_types", "fused optimizers take fake tensors too", "list"
    ),
    *data("torch.utils._foreach_utils", "_foreach_supported_types", "the same for clipping", "list"),
    *each("module", "torch.utils", "_foreach_utils", "see the row above"),
    *data(
        "torch.backends.cuda.matmul",
        "allow_bf16_reduced_precision_reduction_split_k allow_fp16_reduced_precision_reduction_split_k",
        "sums of gradients in float32",
        "bool",
    ),
    # Fake tensors and dispatch.
    *each("class", _FAKE, "FakeTensor FakeTensorMode", "what a trace runs on"),
    *each(
        "class",
        _FAKE,
        "DataDependentOutputException DynamicOutputShapeException",
        "an operator that asks for values",
    ),
    *each("class", _FAKE, "UnsupportedOperatorException", "an operator without a fake rule"),
    *each("called", _FAKE, "unset_fake_temporarily", "real tensors within a trace"),
    *data(
        f"{_FAKE}.FakeTensorMode()",
        "cache_enabled avoid_device_init",
        "two of its settings, which ours decides",
        "bool",
    ),
    *data(
        f"{_FAKE}.FakeTensorMode()",
        "in_kernel_invocation _allow_unsafe_data_ptr_access",
        "views are made without it",
        "bool",
    ),
    called(
        "torch.Tensor", "_make_subclass", None, "makes a fake tensor of a meta one, as torch's own code does"
    ),
    called(
        "torch._C", "_dispatch_keys", None, "whether two tensors are of a kind: conjugated, of inference mode"
    ),
    called("torch._C", "_set_meta_in_tls_dispatch_include", None, "kernels without values, on fake tensors"),
    called("torch._C", "_set_throw_on_mutable_data_ptr", None, "as torch guards a fake tensor's address"),
    called("torch._C", "_set_warn_deprecated_on_mutable_data_ptr", None, "the same"),
    *each(
        "class", "torch._C", "_DisableTorchDispatch _PreserveDispatchKeyGuard", "a kernel without any mode"
    ),
    *each("class", _DISPATCH, "TorchDispatchMode", "sees every operator"),
    *each("called", _DISPATCH, "_disable_current_modes", "steps outside of all modes"),
    called("torch._C", "_get_dispatch_mode", None, "whether a thread is the one that is traced"),
    *each("class", "torch._C", "_TorchDispatchModeKey", "the key to ask for"),
    *each(
        "class",
        "torch._C",
        "_AutoDispatchBelowAutograd _ExcludeDispatchKeyGuard",
        "kernels whose own calls skip a key",
    ),
    called("torch._C", "_dispatch_key_parse", None, "such a key by its name"),
    called(
        "torch._C", "_dispatch_get_all_op_names", None, "which operators CUDA's autocast knows in this torch"
    ),
    called("torch._C", "_dispatch_has_kernel_for_dispatch_key", None, "which operators have a kernel"),
    *each("class", "torch._ops", "OpOverload", "operators as a dispatch mode gets them"),
    *data(
        "torch._ops.OpOverload()", "_schema", "names of arguments, and which it writes to", "FunctionSchema"
    ),
    *data("torch._ops.OpOverload()", "_opname", "the operator's name in logs of work", "str"),
    called("torch.utils._pytree", "tree_leaves", "tree", "tensors within arguments"),
    called("torch.utils._pytree", "tree_map", "func tree", "known values within arguments"),
    # Devices and processes.
    called(
        "torch.utils.backend_registration",
        "_setup_privateuseone_for_python_backend",
        "rename * backend_module device_guard",
        "makes the device type of the virtual GPU",
    ),
    *each("class", "torch._C._acc", "DeviceGuard", "its guard, which takes the exceptions of hooks"),
    *each("class", "torch._C._autograd", "DeviceType", "the type that the guard is asked for"),
    called(
        "torch.cuda._utils",
        "_get_device_index",
        "device * optional",
        "refuses what torch.cuda refuses, in its words",
    ),
    called("torch._C", "_get_sdp_priority_order", None, "the order in which attention kernels are tried"),
    replaced(
        "torch.distributed",
        "_compute_bucket_assignment_by_size",
        "tensors bucket_size_limits expect_sparse_gradient tensor_indices logger",
        "DDP's buckets in a trace, as they are from the second step on",
    ),
    replaced(
        "torch.distributed.Reducer", "_rebuild_buckets", None, "their order, which ranks agree on by values"
    ),
    *data("torch.distributed", "_DEFAULT_FIRST_BUCKET_BYTES", "of those buckets, the first", "int"),
    *each("module", "torch.testing", "_internal", "where that lies"),
    *each(
        "module",
        "torch.testing._internal.distributed",
        "fake_pg",
        "one process of several, without the others",
    ),
    replaced(
        "torch.distributed.distributed_c10d",
        "_new_process_group_helper",
        None,  # ours passes on what it does not look at
        "a process group of one needs no NCCL",
    ),
    replaced("torch._VF", "_pad_packed_sequence", None, "pads packed rows without reading their memory"),
    called(
        "torch.distributed.distributed_c10d", "_get_default_store", "", "one process of many prints an error"
    ),
    called(
        "torch.distributed.distributed_c10d",
        "_resolve_process_group",
        "group_name",
        "how many processes one of DTensor's collectives is for",
    ),
    *each(
        "module", "torch.distributed.tensor", "_random", "where DTensor keeps the states of random numbers"
    ),
    *data(
        "torch.distributed.tensor._random",
        "_rng_tracker",
        "what keeps them, for one device and for good: a virtual one's is not left behind",
        "NoneType",
    ),
    *each("module", "torch._prims", "rng_prims", "see the row below"),
    UpstreamName(
        "torch._prims.rng_prims",
        "run_dtensor_rng_op",
        "an operator on a part of a DTensor, recorded",
        "called",
        since=(2, 13),
    ),
    called("torch.distributed.fsdp.FSDPModule", "_get_fsdp_state", "self", "what FSDP2 knows of a module"),
    called(
        "torch.distributed.fsdp.FSDPModule()._get_fsdp_state()",
        "_lazy_init",
        "",
        "makes the model the root, whatever part of it runs first",
    ),
    *data(
        "torch.distributed.fsdp.FSDPModule()._get_fsdp_state()",
        "_fsdp_param_group",
        "the parameters that are gathered together",
        "FSDPParamGroup",
    ),
    *data(
        "torch.distributed.fsdp.FSDPModule()._get_fsdp_state()._fsdp_param_group",
        "_orig_dtype",
        "the type that summed gradients are rounded to",
        "dtype",
        before=(2, 15),
    ),
    *data(
        "torch.distributed.fsdp.FSDPModule()._get_fsdp_state()._fsdp_param_group",
        "_fsdp_params_with_wider_grad_dtype",
        "the parameters whose first gradient keeps its own type",
        "list",
        since=(2, 15),
    ),
    replaced("torch.utils.data.DataLoader", "_get_iterator", "self", "workers of a data loader work here"),
    *data(
        "torch.utils.data.DataLoader().__iter__()",
        "_dataset_fetcher",
        "what fetches a batch",
        "_MapDatasetFetcher",
    ),
    called("torch.utils.data.DataLoader().__iter__()", "_reset", "loader", "begins an epoch; ours is called"),
    *each("module", "torch.utils.data._utils", "worker", "a worker's information"),
    *data("torch.utils.data._utils.worker", "_worker_info", "what the worker's rows see of it", "NoneType"),
    *each(
        "called", _DISPATCH, "_push_mode _pop_mode", "tensors without values are traced in a worker's rows"
    ),
    replaced(
        "torch.nn.attention.flex_attention", "_validate_device", "query key value", "refuses FlexAttention"
    ),
    *each("called", "torch.cuda.memory", "_dump_snapshot", "refused by name"),
    called("torch.cuda.memory", "_snapshot", "", "what a recording writes; refused by name on a virtual GPU"),
    called(
        "torch.cuda.memory",
        "_record_memory_history",
        "* enabled context stacks max_entries clear_history",
        "the same",
    ),
    *each("called", "torch.cuda.jiterator", "_create_jit_fn _create_multi_output_jit_fn", "refused by name"),
    replaced("torch.cuda", "_sleep", "cycles", "a kernel that waits"),
    *each("module", "torch.cuda", "_memory_viz", "its viewer reads what a trace's snapshot writes"),
)
