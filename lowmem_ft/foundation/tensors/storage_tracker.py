"""A dispatch mode that counts the exact bytes of tensor storage alive on one device, and their peak."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lowmem_ft.foundation.tensors.gradient_sums import called_unwatched, take_as_much
from lowmem_ft.foundation.tensors.storage_resizing import storage_resized_by, storage_resizes_seen

if TYPE_CHECKING:
    from typing_extensions import Self

# torch.tensor() fills a storage unseen, then passes it to this operator: its input is new to the program.
_LIFT_FRESH = torch.ops.aten.lift_fresh.default


class StorageTracker(TorchDispatchMode):
    """The bytes of the storages created inside a ``with`` block that are still alive, and their peak.

    A storage is counted once, at its own size (views share one; allocators round, this does not), from the operator
    that returns it until its last reference is dropped, in forward, backward, recomputation and optimizer steps alike::

        with StorageTracker() as tracker:
            loss = model(batch).loss
            kept_for_backward = tracker.live_bytes

    Storages created before the block count only if passed to :meth:`add`. Those that outlive it are still released.

    A storage that is resized exists twice for a moment, as its contents are copied; one resized to nothing, as FSDP2
    frees an unsharded parameter, is gone.

    Limits: workspace that a kernel allocates and frees before it returns is not seen, nor are the storages inside a
    tensor subclass such as DTensor, or a sparse tensor.

    Args:
        device_type: the device whose storages count, such as ``cpu`` or ``cuda``; None: all except ``meta``.
    """

    def __init__(self, device_type: str | None = "cpu") -> None:
        super().__init__()
        self.device_type = device_type
        self.live_bytes = 0
        self.peak_bytes = 0
        self._bytes_by_storage: dict[int, int] = {}
        self._running = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._running.enter_context(storage_resizes_seen(self._measure_again))
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._running.close()

    def add(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor that was created before the block, such as a parameter."""
        for one in self._tensors(tensor):
            self._measure_of(one)

    def reset_peak(self) -> None:
        """Start a new peak from what is alive now."""
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        is_in_place = called_unwatched(func, args, kwargs) is not func
        result = func(*args, **kwargs)
        if is_in_place:
            self._count_as(args[0], result)
            return result
        # A view of, or a write into, a storage from before the block does not create it.
        inputs = () if func is _LIFT_FRESH else (args, kwargs)
        known = {tensor.untyped_storage()._cdata for tensor in self._tensors(inputs)}
        known -= self._bytes_by_storage.keys()
        for tensor in self._tensors(result):
            if tensor.untyped_storage()._cdata not in known:
                self._measure_of(tensor)
        resized = storage_resized_by(func, args, result)
        if resized is not None:
            self._measure_again(resized.untyped_storage())
        return result

    def is_new(self, tensor: torch.Tensor) -> None:
        """Note that this tensor's storage counts from here on; a hook for subclasses that record more than bytes."""

    def _count_as(self, first: torch.Tensor, total: torch.Tensor) -> None:
        """Count a sum's storage in place of that of its first operand, counted or not."""
        take_as_much(total, first)
        size = self._bytes_by_storage.pop(first.untyped_storage()._cdata, None)
        if size is not None:
            self.is_new(total)
            self._follow(total.untyped_storage(), size)

    def _tensors(self, values: Any) -> Iterator[torch.Tensor]:
        """Yield the tensors in an operator's arguments or result, which nest only sequences and dicts."""
        if isinstance(values, torch.Tensor):
            if values.layout is torch.strided and self._counts(values.device.type):
                yield values
        elif isinstance(values, (tuple, list)):
            for value in values:
                yield from self._tensors(value)
        elif isinstance(values, dict):
            yield from self._tensors(list(values.values()))

    def _counts(self, device_type: str) -> bool:
        return device_type == self.device_type or (self.device_type is None and device_type != "meta")

    def _measure_of(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._bytes_by_storage:
            self.is_new(tensor)
        self._measure(storage)

    def _measure_again(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._bytes_by_storage:
            self._measure(storage)

    def _measure(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        before = self._bytes_by_storage.get(key)
        if before == size:
            return
        if before is None:
            self._follow(storage, size)
        self._bytes_by_storage[key] = size
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.live_bytes -= before or 0

    def _follow(self, storage: torch.UntypedStorage, size: int) -> None:
        self._bytes_by_storage[storage._cdata] = size
        weakref.finalize(storage, self._release, storage._cdata).atexit = False

    def _release(self, key: int) -> None:
        # 0 if a sum of gradients is counted in its place.
        self.live_bytes -= self._bytes_by_storage.pop(key, 0)
