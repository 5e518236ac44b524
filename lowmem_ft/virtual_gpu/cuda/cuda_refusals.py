"""Parts of ``torch.cuda`` that a virtual GPU does not have, and what to do without them."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import torch

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.upstream.patches import replace

_HANDLES = (
    "It has no driver to hand out addresses: leave out what calls the CUDA runtime or its libraries itself."
)
_GRAPHS = "CUDA graphs are not modelled: run the step without one, which takes the same kernels."
_ALLOCATORS = (
    "Memory comes from torch's caching allocator: leave other allocators and pools out while tracing."
)
_SENSORS = "Nothing runs that could be measured: leave it out, or ask `gpu.report()` for the time of a step."
_HOST_COUNTERS = "Ask `gpu.report().host_pinned_bytes` for what the program pins."
_SNAPSHOTS = "Ask `gpu.report()` for the peak and `gpu.trace().timeline` for every allocation."
_PROCESSES = "It is one GPU of one process: leave communication out while tracing."
_KERNELS = "Kernels are not compiled or tuned: write that part with torch's operators while tracing."
_CAPABILITY = "Ask `torch.cuda.get_device_capability()`."
_STORAGES = "Make a tensor and take its `untyped_storage()`."

_REFUSED = {
    "torch.cuda": {
        _HANDLES: "current_blas_handle current_solver_handle cudart check_error get_stream_from_external "
        "ExternalStream caching_allocator_alloc caching_allocator_delete GreenContext",
        _GRAPHS: "CUDAGraph graph graph_pool_handle make_graphed_callables",
        _ALLOCATORS: "MemPool use_mem_pool change_current_allocator CUDAPluggableAllocator caching_allocator_enable "
        "caching_allocator_disabled",
        _SENSORS: "utilization temperature power_draw clock_rate memory_usage device_memory_used list_gpu_processes",
        _HOST_COUNTERS: "host_memory_stats host_memory_stats_as_nested_dict reset_peak_host_memory_stats "
        "reset_accumulated_host_memory_stats",
        _SNAPSHOTS: "memory_snapshot",
        _STORAGES: "BFloat16Storage BoolStorage ByteStorage CharStorage ComplexDoubleStorage ComplexFloatStorage "
        "DoubleStorage FloatStorage HalfStorage IntStorage LongStorage ShortStorage",
    },
    "torch.cuda.memory": {
        _SNAPSHOTS: "memory_snapshot _snapshot _dump_snapshot _record_memory_history",
        _ALLOCATORS: "MemPool use_mem_pool change_current_allocator CUDAPluggableAllocator caching_allocator_enable",
        _HOST_COUNTERS: "host_memory_stats host_memory_stats_as_nested_dict reset_peak_host_memory_stats "
        "reset_accumulated_host_memory_stats",
    },
    "torch.cuda.graphs": {_GRAPHS: "CUDAGraph graph graph_pool_handle make_graphed_callables"},
    "torch.cuda.nccl": {
        _PROCESSES: "unique_id init_rank all_reduce reduce broadcast all_gather reduce_scatter"
    },
    "torch.cuda.comm": {
        _PROCESSES: "broadcast broadcast_coalesced reduce_add reduce_add_coalesced scatter gather"
    },
    "torch.cuda.jiterator": {_KERNELS: "_create_jit_fn _create_multi_output_jit_fn"},
    "torch.cuda.tunable": {
        _KERNELS: "enable is_enabled tuning_enable tuning_is_enabled record_untuned_enable record_untuned_is_enabled "
        "set_max_tuning_duration get_max_tuning_duration set_max_tuning_iterations get_max_tuning_iterations "
        "set_filename get_filename get_results get_validators read_file set_rotating_buffer_size "
        "get_rotating_buffer_size set_numerical_check_tolerances tune_gemm_in_file mgpu_tune_gemm_in_file"
    },
    "torch.cuda.gds": {_HANDLES: "GdsFile gds_register_buffer gds_deregister_buffer"},
    "torch.cuda.green_contexts": {_HANDLES: "GreenContext"},
    "torch.accelerator": {_CAPABILITY: "get_device_capability", _GRAPHS: "Graph"},
}

_ANNOTATIONS = ("range_push", "range_pop", "mark", "range_start", "range_end")


def cuda_without_hardware(undo: contextlib.ExitStack) -> None:
    """Let missing parts raise until a stack is undone; marks for profilers are accepted and ignored."""
    for module_name, table in _REFUSED.items():
        module = importlib.import_module(module_name)
        for way_out, names in table.items():
            for name in names.split():
                if hasattr(module, name):
                    refusal = _refusal(getattr(module, name), f"{module_name}.{name}", way_out)
                    replace(undo, module, name, refusal)
    for name in _ANNOTATIONS:
        replace(undo, torch.cuda.nvtx, name, _mark)
    for name in ("start", "stop"):
        replace(undo, torch.cuda.profiler, name, _mark)


def _refusal(real: Any, name: str, way_out: str) -> Any:
    """Return a function, or a class without instances, that only raises."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UserError(f"A virtual GPU has no {name}. {way_out}")

    if not isinstance(real, type):
        return refuse

    class Refuses(type):
        __call__ = refuse

        def __getattr__(cls, attribute: str) -> Any:
            if attribute.startswith("_"):
                raise AttributeError(attribute)
            refuse()

    return Refuses(name.rpartition(".")[2], (), {})


def _mark(*args: Any, **kwargs: Any) -> int:
    return 0
