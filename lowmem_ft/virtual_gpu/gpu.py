"""A GPU of the catalogue that any PyTorch training function can run on, on a machine that has none."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from lowmem_ft.foundation.catalog.context_overhead import process_overhead_bytes
from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.memory.memory_estimate import BudgetVerdict, MemoryEstimate
from lowmem_ft.foundation.memory.race import Race, race_error
from lowmem_ft.foundation.memory.snapshot import memory_snapshot
from lowmem_ft.foundation.virtual_device import DEVICE_TYPE, activated
from lowmem_ft.virtual_gpu.calls.active import active_gpu_or_none
from lowmem_ft.virtual_gpu.calls.fake_results import tensors_in
from lowmem_ft.virtual_gpu.checks.device_mismatches import check_devices, check_generator
from lowmem_ft.virtual_gpu.checks.dtype_checks import Capability, check_dtypes
from lowmem_ft.virtual_gpu.costs.one_process import virtual_process_groups
from lowmem_ft.virtual_gpu.costs.workspaces import persistent_workspaces, workspace_bytes
from lowmem_ft.virtual_gpu.cuda.cuda_names import cuda_is_virtual
from lowmem_ft.virtual_gpu.device.registration import register_virtual_device
from lowmem_ft.virtual_gpu.device.streams import number_anew
from lowmem_ft.virtual_gpu.kernels.index_writes import check_index_writes
from lowmem_ft.virtual_gpu.recurrent.package_functions import package_functions_as_installed
from lowmem_ft.virtual_gpu.replay.memory_counters import MemoryCounters
from lowmem_ft.virtual_gpu.replay.trace_estimate import (
    EstimateContext,
    allocator_config_of_environment,
    estimate_on_gpu,
)
from lowmem_ft.virtual_gpu.tracing_machine import TracingMachine
from lowmem_ft.virtual_gpu.triton.triton_launches import triton_as_on_cuda
from lowmem_ft.virtual_gpu.upstream.flash_attention import flash_attention_as_on_cuda
from lowmem_ft.virtual_gpu.upstream.recurrent_layers import recurrent_layers_by_cudnn
from lowmem_ft.virtual_gpu.upstream.trl_kernels import trl_kernels_as_on_cuda
from lowmem_ft.virtual_gpu.values.routing import Routing


class VirtualGPU(TracingMachine):
    """A tracing machine with one GPU of the catalogue.

        with VirtualGPU("t4") as gpu:
            model = gpu.place(model_on_meta)
            train(model)  # any PyTorch training function
        print(gpu.report())

    A process can have one at a time. Attributes are those of :class:`TracingMachine`.

    Args:
        gpu: name in the catalogue, or a :class:`Gpu` of your own.
        check_streams: whether to look for races: uses of the same memory by several streams, or by a stream and the
            host, that no event, wait or synchronisation orders. The block raises an error at its end if there are any,
            unless another error has ended it.
        routing: how the routers of mixtures of experts route tokens: ``uneven``, which needs the most memory, or
            ``balanced``.

    Raises:
        UserError: if the catalogue has no such GPU.
        RaceError: at the end of the block; :attr:`races` and the report list all races.
    """

    def __init__(
        self,
        gpu: str | Gpu = "a100-80gb",
        *,
        check_streams: bool = False,
        routing: Routing = "uneven",
    ) -> None:
        self.spec = gpu if isinstance(gpu, Gpu) else find_gpu(gpu)
        self.cap_bytes: int | None = None
        register_virtual_device()
        super().__init__(
            torch.device(DEVICE_TYPE, 0),
            check=_CudaChecks(DEVICE_TYPE, self.spec.compute_capability),
            workspace_rule=functools.partial(workspace_bytes, gpu=self.spec),
            workspaces=functools.partial(persistent_workspaces, gpu=self.spec),
            check_streams=check_streams,
            routing=routing,
        )
        self.counters = MemoryCounters(self.recorder.timeline, allocator_config_of_environment())

    def _enter(self, stack: contextlib.ExitStack) -> None:
        outer = active_gpu_or_none()
        if outer is not None:
            raise UserError(
                f"One virtual GPU at a time, got {self.spec.name} inside the block of {outer.spec.name}. End "
                "that block first."
            )
        number_anew()
        stack.enter_context(activated(self))
        cuda_is_virtual(stack, register_virtual_device())
        virtual_process_groups(stack, self.peers, self.mark, self.say)
        flash_attention_as_on_cuda(stack)
        triton_as_on_cuda(stack)
        trl_kernels_as_on_cuda(stack)
        package_functions_as_installed(stack)
        super()._enter(stack)
        recurrent_layers_by_cudnn(stack, self.say, self.recorder.size_is_uncertain)

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        _call_it_cuda(exception[1])
        if self.races and exception[0] is None:
            raise race_error(self.races)

    @property
    def races(self) -> tuple[Race, ...]:
        """Races that ``check_streams`` has found so far."""
        checker = self.recorder.checker
        return () if checker is None else checker.races()

    def outside_bytes(self) -> int:
        """Return the device bytes that a process holds on this GPU outside torch's allocator."""
        return sum(self._outside().values())

    def snapshots(self) -> Callable[[], dict[str, Any]]:
        """Return a function that makes a snapshot for pytorch.org/memory_viz of what happens from now on."""
        timeline, begin = self.recorder.timeline, len(self.recorder.timeline.events)

        def snapshot() -> dict[str, Any]:
            whole = memory_snapshot(timeline, self.counters.config)
            traces = (
                [entry for entry in trace if entry["time_us"] >= begin] for trace in whole["device_traces"]
            )
            return {**whole, "device_traces": list(traces)}

        return snapshot

    def _outside(self) -> dict[str, int]:
        return process_overhead_bytes(
            self.spec, uses_bitsandbytes="bitsandbytes" in sys.modules, num_processes=self.peers.num_processes
        )

    def report(self, *, tokens_per_step: int = 0) -> MemoryEstimate:
        """Estimate what the programs that ran here need on this GPU.

        Args:
            tokens_per_step: tokens of one optimizer step, for tokens per second.

        Returns:
            The estimate. Its time is that of the last optimizer step; it leaves out host memory that the trace does not
            record.
        """
        estimate = estimate_on_gpu(
            self.trace(),
            self.spec,
            BudgetVerdict(device_bytes=self.spec.memory_bytes, host_bytes=None),
            EstimateContext(
                outside_bytes=self._outside(),
                tokens_per_step=tokens_per_step,
                allowed_bytes=self.cap_bytes,
                is_compiled=self.compiled.is_called,
                not_modelled=("host memory of the process other than its tensors",),
            ),
            self.trace_seconds,
        )
        return dataclasses.replace(estimate, races=self.races)


def _call_it_cuda(error: BaseException | None) -> None:
    """Replace the device's name in an error of torch's C++, so that it reads as on CUDA.

    Errors about operators that only this device lacks stay as they are.
    """
    if type(error) is RuntimeError and error.args and isinstance(error.args[0], str):
        error.args = (error.args[0].replace(DEVICE_TYPE, "cuda"), *error.args[1:])


@dataclass(frozen=True)
class _CudaChecks:
    """Refuses calls that CUDA refuses because of their tensors' devices and types, or because of the GPU.

    A call that passes once passes whenever it is repeated with equal arguments.

    Args:
        device_type: type of the virtual device.
        compute_capability: that of the GPU.
    """

    device_type: str
    compute_capability: Capability

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise as CUDA would.

        Raises:
            RuntimeError: in CUDA's words.
        """
        generator = kwargs.get("generator")
        if generator is not None:
            check_generator(generator, args, kwargs)
        devices = {tensor.device.type for tensor in tensors_in((args, kwargs))} - {"meta"}
        if self.device_type in devices and isinstance(func, OpOverload):
            if len(devices) > 1 and func.namespace == "aten":
                check_devices(func, args, kwargs)
            check_dtypes(func, args, kwargs, self.compute_capability)
            check_index_writes(func, args, kwargs)
