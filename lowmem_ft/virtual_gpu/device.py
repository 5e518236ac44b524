"""The device ``vgpu``: fake tensors live on it and autograd works on it, but nothing is computed.

torch lets Python stand in for its PrivateUse1 backend: a device guard, and a module with the functions that
``torch.cuda`` has. Tensors on it exist under ``FakeTensorMode`` only: shapes, types and storages without bytes.

The module, ``torch.vgpu``, answers for whatever :class:`VirtualGPU` is being traced.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

if TYPE_CHECKING:
    from lowmem_ft.virtual_gpu.gpu import VirtualGPU

DEVICE_TYPE = "vgpu"


@functools.cache
def register_virtual_device() -> VirtualBackend:
    """Make ``torch.device("vgpu")`` exist in this process, once; its module is returned, and is ``torch.vgpu``."""
    backend = VirtualBackend()
    _setup_privateuseone_for_python_backend(DEVICE_TYPE, backend_module=backend)
    # Both registrations need the device, and hold for the process as torch's own kernels do.
    from lowmem_ft.virtual_gpu.attention import register_attention
    from lowmem_ft.virtual_gpu.autocast import register_autocast
    from lowmem_ft.virtual_gpu.fake_rules import register_fake_rules

    register_fake_rules()
    register_attention()
    register_autocast()
    return backend


def active_gpu() -> VirtualGPU:
    """The virtual GPU whose ``with`` block is running."""
    gpu = register_virtual_device().active
    assert gpu is not None, "the device vgpu has no memory outside `with VirtualGPU(...)`"
    return gpu


class VirtualEvent:
    """A point on a stream, as ``torch.cuda.Event``; the clock says when it is reached."""

    _ids = itertools.count()

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self.id = next(self._ids)

    def record(self, stream: VirtualStream | None = None) -> None:
        """Put the event behind all work that the stream has so far."""
        gpu = active_gpu()
        gpu.work.record_event(self.id, gpu.current_stream.id if stream is None else stream.id)

    def wait(self, stream: VirtualStream | None = None) -> None:
        """Let a stream's further work wait for the event."""
        gpu = active_gpu()
        gpu.work.wait_event(self.id, gpu.current_stream.id if stream is None else stream.id)

    def synchronize(self) -> None:
        """Let the host wait for the event."""
        active_gpu().work.synchronize_event(self.id)

    def query(self) -> bool:
        """Whether the event has been reached: what a program sees that asks often enough."""
        return True

    def elapsed_time(self, end: VirtualEvent) -> float:
        """Milliseconds between two events, unknown while tracing: 0."""
        return 0.0


class VirtualStream:
    """A queue of work with a memory pool of its own, as ``torch.cuda.Stream``; stream 0 is the default one."""

    _ids = itertools.count(1)

    def __init__(self, device: Any = None, priority: int = 0, *, stream_id: int | None = None) -> None:
        self.id = next(self._ids) if stream_id is None else stream_id
        self.device = torch.device(DEVICE_TYPE, 0)

    @classmethod
    def number_from(cls, number: int) -> None:
        """Count new streams from here."""
        cls._ids = itertools.count(number)

    def wait_event(self, event: VirtualEvent) -> None:
        """Let further work on this stream wait for the event."""
        event.wait(self)

    def wait_stream(self, stream: VirtualStream) -> None:
        """Let further work on this stream wait for all that another stream has so far."""
        event = VirtualEvent()
        event.record(stream)
        event.wait(self)

    def record_event(self, event: VirtualEvent | None = None) -> VirtualEvent:
        """An event behind all work that this stream has so far."""
        event = event or VirtualEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Let the host wait for this stream."""
        self.record_event().synchronize()

    def query(self) -> bool:
        """Whether all work is done: what a program sees that asks often enough."""
        return True


class VirtualBackend:
    """What ``torch.cuda`` is to a GPU: the functions by which programs ask the device about itself."""

    stands_for = "cuda"
    _initialized = False  # or torch.utils.checkpoint would fetch the state of the device's random numbers
    Stream = VirtualStream
    Event = VirtualEvent

    def __init__(self) -> None:
        self.active: VirtualGPU | None = None

    # torch calls these while it registers the device and when it is asked for its devices.
    def is_initialized(self) -> bool:  # noqa: D102
        return True

    def is_available(self) -> bool:  # noqa: D102
        return self.active is not None

    def device_count(self) -> int:  # noqa: D102
        return 1

    def current_device(self) -> int:  # noqa: D102
        return 0

    def set_device(self, device: Any) -> None:  # noqa: D102
        pass

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed(self, seed: int) -> None:  # noqa: D102
        pass

    manual_seed_all = manual_seed

    def is_current_stream_capturing(self) -> bool:
        """CUDA graphs are not modelled."""
        return False

    # torch.random.fork_rng asks for these in whatever runs in this process from now on.
    def get_rng_state(self, device: Any = None) -> torch.Tensor:  # noqa: D102
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, new_state: torch.Tensor, device: Any = None) -> None:  # noqa: D102
        pass

    def get_rng_state_all(self) -> list[torch.Tensor]:  # noqa: D102
        return [self.get_rng_state()]

    def set_rng_state_all(self, new_states: list[torch.Tensor]) -> None:  # noqa: D102
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:  # noqa: D102
        return [torch.bfloat16, torch.float16, torch.float32]

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        """There is one device: this changes nothing."""
        yield

    # What the GPU is.
    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        """Its compute capability."""
        return active_gpu().spec.compute_capability

    def get_device_name(self, device: Any = None) -> str:
        """Its maker's name for it."""
        return active_gpu().spec.full_name

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        """Whether it computes with bfloat16: in hardware since compute capability 8.0, emulated before."""
        return including_emulation or active_gpu().spec.has_bfloat16

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        """The properties that programs read most."""
        spec = active_gpu().spec
        major, minor = spec.compute_capability
        return SimpleNamespace(
            name=spec.full_name,
            major=major,
            minor=minor,
            total_memory=spec.memory_bytes,
            multi_processor_count=spec.num_multiprocessors,
        )

    # Its memory, as far as the trace has come.
    def memory_allocated(self, device: Any = None) -> int:
        """Bytes of live storages, unrounded."""
        return active_gpu().recorder.live_bytes

    def max_memory_allocated(self, device: Any = None) -> int:
        """The most bytes of live storages since the last reset, unrounded."""
        return active_gpu().recorder.peak_bytes

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Start a new peak for :meth:`max_memory_allocated`; the report keeps the whole timeline."""
        active_gpu().recorder.reset_peak()

    memory_reserved = memory_allocated
    max_memory_reserved = max_memory_allocated

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        """The counters of ``torch.cuda.memory_stats`` that a trace knows."""
        now, peak = self.memory_allocated(), self.max_memory_allocated()
        return {"allocated_bytes.all.current": now, "allocated_bytes.all.peak": peak, "num_alloc_retries": 0}

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Free and total bytes."""
        total = active_gpu().spec.memory_bytes
        return max(0, total - self.memory_allocated()), total

    def empty_cache(self) -> None:
        """Give cached memory back to the driver."""
        active_gpu().recorder.timeline.empty_cache()

    def set_per_process_memory_fraction(self, fraction: float, device: Any = None) -> None:
        """Lower the cap of the caching allocator."""
        active_gpu().cap_memory(int(fraction * active_gpu().spec.memory_bytes))

    # Its streams.
    def current_stream(self, device: Any = None) -> VirtualStream:
        """The stream that work and memory go to."""
        return active_gpu().current_stream

    def default_stream(self, device: Any = None) -> VirtualStream:
        """Stream 0."""
        return VirtualStream(stream_id=0)

    def set_stream(self, stream: VirtualStream) -> None:
        """Send further work to a stream."""
        active_gpu().current_stream = stream

    @contextlib.contextmanager
    def stream(self, stream: VirtualStream | None) -> Iterator[None]:
        """Send the work of a block to a stream."""
        gpu = active_gpu()
        before = gpu.current_stream
        gpu.current_stream = stream or before
        try:
            yield
        finally:
            gpu.current_stream = before

    def synchronize(self, device: Any = None) -> None:
        """Let the host wait for all streams."""
        active_gpu().work.synchronize()
