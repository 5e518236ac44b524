"""The device ``vgpu``: fake tensors live on it and autograd works on it, but nothing is computed.

torch lets Python implement its PrivateUse1 backend: a device guard, and a module with the functions that
``torch.cuda`` has. Tensors on it exist under ``FakeTensorMode`` only: shapes, types and storages without bytes.

The module, ``torch.vgpu``, answers for the :class:`VirtualGPU` that is being traced.
"""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from lowmem_ft.foundation.virtual_device import DEVICE_TYPE
from lowmem_ft.virtual_gpu.calls.active import active_gpu, active_gpu_or_none
from lowmem_ft.virtual_gpu.calls.device_index import device_index
from lowmem_ft.virtual_gpu.device.streams import (
    VirtualEvent,
    VirtualStream,
    VirtualStreamContext,
    current_stream,
    orderings_for,
    set_stream,
)

if TYPE_CHECKING:
    from lowmem_ft.virtual_gpu.recording.recorder import Recorder

RNG_STATE_BYTES = 16
"""Bytes of a CUDA generator's state: its seed and its offset (aten/src/ATen/cuda/CUDAGeneratorImpl.cpp)."""


class _Properties(SimpleNamespace):
    def __getattr__(self, name: str) -> Any:
        known = ", ".join(vars(self))
        raise AttributeError(f"A virtual GPU has no property {name}; it knows {known}.")


class _VirtualDeviceContext:
    """``torch.cuda.device``: there is one device, so this changes nothing."""

    def __init__(self, device: Any) -> None:
        self.idx = device_index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = 0

    def __exit__(self, *exception: object) -> None:
        """Return to the same device, so do nothing."""


class _VirtualDeviceOf(_VirtualDeviceContext):
    """``torch.cuda.device_of``: switches to the device of a tensor or a storage, and so changes nothing."""

    def __init__(self, obj: Any) -> None:
        super().__init__(0 if obj.device.type == DEVICE_TYPE else None)


class VirtualBackend:
    """The virtual GPU's counterpart of ``torch.cuda``: the functions by which programs query the device."""

    stands_for = "cuda"
    _initialized = False  # else torch.utils.checkpoint would fetch the device's RNG state
    Stream = VirtualStream
    Event = VirtualEvent
    StreamContext = VirtualStreamContext
    device = _VirtualDeviceContext
    device_of = _VirtualDeviceOf

    # torch calls these while it registers the device and when a program asks for its devices.
    def is_initialized(self) -> bool:  # noqa: D102
        return True

    def is_available(self) -> bool:  # noqa: D102
        return active_gpu_or_none() is not None

    def device_count(self) -> int:  # noqa: D102
        gpu = active_gpu_or_none()
        return 1 if gpu is None else gpu.peers.num_processes

    def current_device(self) -> int:  # noqa: D102
        return 0

    def set_device(self, device: Any) -> None:  # noqa: D102
        device_index(device, optional=False)

    def init(self) -> None:
        """Return at once: there is nothing to initialise."""

    def ipc_collect(self) -> None:
        """Return at once: no other process shares memory with this one."""

    def initial_seed(self) -> int:  # noqa: D102
        return torch.default_generator.initial_seed()

    def seed(self) -> None:  # noqa: D102
        pass

    seed_all = seed

    def get_sync_debug_mode(self) -> int:  # noqa: D102
        return active_gpu().recorder.orderings.sync_debug_mode

    def set_sync_debug_mode(self, debug_mode: int | str) -> None:
        """Warn or raise from now on where the host waits for the device.

        Raises:
            RuntimeError: if the mode is unknown.
        """
        names = {"default": 0, "warn": 1, "error": 2}
        if debug_mode not in (*names, *names.values()):
            known = "`default`, `warn`, `error`" if isinstance(debug_mode, str) else "0,1,2"
            raise RuntimeError(f"invalid value of debug_mode, expected one of {known}")
        mode = names[debug_mode] if isinstance(debug_mode, str) else debug_mode
        active_gpu().recorder.orderings.sync_debug_mode = mode

    def can_device_access_peer(self, device: Any, peer_device: Any) -> bool:
        """Return False: no GPU is its own peer, and there is no other."""
        device_index(device)
        device_index(peer_device, optional=False)
        return False

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed(self, seed: int) -> None:  # noqa: D102
        int(seed)

    manual_seed_all = manual_seed

    def is_current_stream_capturing(self) -> bool:
        """Return False: CUDA graphs are not modelled."""
        return False

    # torch.random.fork_rng calls these in whatever runs in this process from now on.
    def get_rng_state(self, device: Any = "cuda") -> torch.Tensor:  # noqa: D102
        device_index(device)
        return torch.zeros(RNG_STATE_BYTES, dtype=torch.uint8, device="cpu")

    def set_rng_state(self, new_state: torch.Tensor, device: Any = "cuda") -> None:
        """Check the state as CUDA does, and ignore it: no random numbers are drawn.

        Raises:
            TypeError: if it is not a state of CUDA's generator, in CUDA's words.
            RuntimeError: if it is the state of another kind of generator, likewise.
        """
        device_index(device)
        if not (new_state.is_cpu and new_state.dtype == torch.uint8):
            raise TypeError("RNG state must be a torch.ByteTensor")
        if new_state.numel() != RNG_STATE_BYTES:
            raise RuntimeError("RNG state is wrong size")

    def get_rng_state_all(self) -> list[torch.Tensor]:  # noqa: D102
        return [self.get_rng_state()]

    def set_rng_state_all(self, new_states: list[torch.Tensor]) -> None:  # noqa: D102
        for index, state in enumerate(new_states):
            self.set_rng_state(state, index)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:  # noqa: D102
        return [torch.bfloat16, torch.float16, torch.float32]

    # Properties of the GPU.
    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        """Return its compute capability."""
        device_index(device)
        return active_gpu().spec.compute_capability

    def has_triton(self) -> bool:
        """Return whether Triton is installed on machines with this GPU; not a function of torch."""
        return active_gpu().spec.has_triton

    def get_device_name(self, device: Any = None) -> str:
        """Return its maker's name for it."""
        device_index(device)
        return active_gpu().spec.full_name

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        """Return whether it computes in bfloat16: in hardware since compute capability 8.0, emulated before."""
        return including_emulation or active_gpu().spec.has_bfloat16

    def is_tf32_supported(self) -> bool:
        """Return whether it has tensor cores for TF32."""
        return self.get_device_capability() >= (8, 0)

    def get_arch_list(self) -> list[str]:
        """Return the architecture of the GPU itself: any build for it will do."""
        major, minor = self.get_device_capability()
        return [f"sm_{major}{minor}"]

    def get_gencode_flags(self) -> str:
        """Return the flags of a build for this GPU alone."""
        (name,) = self.get_arch_list()
        return f"-gencode compute={name.replace('sm_', 'compute_')},code={name}"

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        """Return the properties that programs read most."""
        device_index(device)
        spec = active_gpu().spec
        major, minor = spec.compute_capability
        return _Properties(
            name=spec.full_name,
            major=major,
            minor=minor,
            total_memory=spec.memory_bytes,
            multi_processor_count=spec.num_multiprocessors,
            warp_size=32,
            is_integrated=False,
            is_multi_gpu_board=False,
        )

    # Its memory at this point of the trace.
    def memory_allocated(self, device: Any = None) -> int:
        """Return the bytes of live storages, unrounded."""
        device_index(device)
        return active_gpu().recorder.live_bytes

    def max_memory_allocated(self, device: Any = None) -> int:
        """Return the peak bytes of live storages since the last reset, unrounded."""
        device_index(device)
        return active_gpu().recorder.peak_bytes

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Start new peaks for the counters; the report keeps the whole timeline."""
        device_index(device)
        active_gpu().recorder.reset_peak()
        active_gpu().counters.reset_peaks()

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def reset_accumulated_memory_stats(self, device: Any = None) -> None:
        """Reset the counts of allocations and frees."""
        device_index(device)
        active_gpu().counters.reset_sums()

    def memory_reserved(self, device: Any = None) -> int:
        """Return the bytes that the caching allocator holds."""
        return self.memory_stats(device)["reserved_bytes.all.current"]

    def max_memory_reserved(self, device: Any = None) -> int:
        """Return the most bytes that the caching allocator has held since the last reset."""
        return self.memory_stats(device)["reserved_bytes.all.peak"]

    memory_cached, max_memory_cached = memory_reserved, max_memory_reserved

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        """Return the counters of the caching allocator, as if it had no limit."""
        device_index(device)
        return active_gpu().counters.stats()

    def memory_stats_as_nested_dict(self, device: Any = None) -> dict[str, Any]:
        """Return the same counters as nested dictionaries."""
        nested: dict[str, Any] = {}
        for name, value in self.memory_stats(device).items():
            *outer, last = name.split(".")
            within = nested
            for part in outer:
                within = within.setdefault(part, {})
            within[last] = value
        return nested

    def get_allocator_backend(self) -> str:
        """Return torch's default allocator."""
        return "native"

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Return the free and the total bytes."""
        device_index(device)
        total = active_gpu().spec.memory_bytes
        return max(0, total - self.memory_allocated()), total

    def empty_cache(self) -> None:
        """Give cached memory back to the driver."""
        active_gpu().recorder.timeline.empty_cache()

    def empty_host_cache(self) -> None:
        """Return at once: pinned host memory is given back as soon as it is free."""

    def set_per_process_memory_fraction(self, fraction: float, device: Any = None) -> None:
        """Lower the cap of the caching allocator."""
        if device is not None:
            device_index(device, optional=False)
        if not isinstance(fraction, float):
            raise TypeError("Invalid type for fraction argument, must be `float`")
        if not 0 <= fraction <= 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        gpu = active_gpu()
        gpu.cap_bytes = int(fraction * gpu.spec.memory_bytes)

    def get_per_process_memory_fraction(self, device: Any = None) -> float:
        """Return the cap as a share of the memory."""
        if device is not None:
            device_index(device, optional=False)
        gpu = active_gpu()
        return 1.0 if gpu.cap_bytes is None else gpu.cap_bytes / gpu.spec.memory_bytes

    # Its streams.
    def current_stream(self, device: Any = None) -> VirtualStream:
        """Return the stream that work and memory go to."""
        device_index(device)
        return current_stream()

    def default_stream(self, device: Any = None) -> VirtualStream:
        """Return stream 0."""
        device_index(device)
        return VirtualStream(stream_id=0)

    def set_stream(self, stream: VirtualStream) -> None:
        """Send further work to a stream."""
        set_stream(stream)

    def stream(self, stream: VirtualStream | None) -> VirtualStreamContext:
        """Send the work of a block to a stream."""
        return VirtualStreamContext(stream)

    def register_host_memory(self, pages: torch.Tensor) -> _HostRegistration:
        """Pin whole pages that the caller has allocated, as ``cudaHostRegister`` does for a GPU."""
        return _HostRegistration(active_gpu().recorder, pages)

    def host_may_use(self, memory: torch.Tensor) -> None:
        """Declare that the host may now read and write memory where the trace cannot see it, as by its files."""
        checker = active_gpu().recorder.checker
        if checker is not None:
            checker.host_may_use(memory)

    def synchronize(self, device: Any = None) -> None:
        """Let the host wait for all streams."""
        device_index(device)
        orderings_for("synchronize").synchronize()


class _HostRegistration:
    """Host memory that a program pins itself (``cudaHostRegister``), until its pages are freed or its trace ends.

    Freeing it does not wait for copies.

    Args:
        recorder: the trace's recorder.
        pages: whole pages, allocated by the caller.
    """

    def __init__(self, recorder: Recorder, pages: torch.Tensor) -> None:
        recorder.mark_place(pages, "pinned")
        self._recorder = weakref.ref(recorder)  # weak, as whoever keeps traces keeps memory, too
        self._index = recorder.index_of(pages)
        if recorder.checker is not None and self._index is not None:
            recorder.checker.registered(self._index)

    def synchronize(self) -> None:
        """Let the host wait for all streams of the GPU that the memory is registered with."""
        if (recorder := self._open_recorder()) is not None:
            recorder.orderings.synchronize()

    def unregister(self) -> None:
        """Unregister the pages, as ``cudaHostUnregister`` does."""
        recorder = self._open_recorder()
        if recorder is not None and recorder.checker is not None and self._index is not None:
            recorder.checker.gives_back(self._index, "cudaHostUnregister")

    def _open_recorder(self) -> Recorder | None:
        recorder = self._recorder()
        return None if recorder is None or recorder.is_closed else recorder
