"""Copies between host and device with ``non_blocking=True``, and whether CUDA really lets the host continue.

It does for pinned memory. Pageable memory is copied through the driver's own pinned buffers: on its way to the device,
the host waits until its stream has come so far, except for the few bytes that travel with the command; on its way to
the host, it waits until the data has arrived. ``.to("cpu", non_blocking=True)`` makes pinned memory.

Source: CUDA's "API synchronization behavior" and the programming guide's list of implicit asynchronous calls; pytorch,
aten/src/ATen/native/TensorConversions.cpp and cuda/Copy.cu.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lowmem_ft.virtual_gpu.calls.work import Work
from lowmem_ft.virtual_gpu.upstream.fake_tensor_patches import was_pinned_elsewhere
from lowmem_ft.virtual_gpu.values.questions import asking_line

if TYPE_CHECKING:
    from lowmem_ft.virtual_gpu.recording.recorder import Recorder

aten = torch.ops.aten

_INDEXING = frozenset(
    {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
)

SENT_AT_ONCE_BYTES = 2**16
"""Bytes that travel to the device with the command, from any kind of memory."""


class HostCopies:
    """Decides which copies block the host.

    Args:
        recorder: knows the place of each memory.
        say: called for each line whose copy waits all the same.
    """

    def __init__(self, recorder: Recorder, say: Callable[[str], None]) -> None:
        self._recorder = recorder
        self._say = say

    def indices(self, func: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
        """Return the host tensors that index one on the device: CUDA copies them first, and the host waits.

        Source: pytorch, aten/src/ATen/native/TensorAdvancedIndexing.cpp, ``make_info``.
        """
        if func not in _INDEXING or args[0].device.type != self._recorder.device_type != "cpu":
            return []
        return [index for index in args[1] if index is not None and index.device.type == "cpu"]

    def begin(self, func: Any, args: tuple[Any, ...], result: Any, copy: Work) -> None:
        """Mark a copy as blocking where CUDA lets the host wait even though the program asked not to.

        Args:
            func: the operator.
            args: its arguments.
            result: what it returned.
            copy: its work, whose ``blocking`` is set.

        Raises:
            RuntimeError: where CUDA's debug mode forbids a blocking copy.
        """
        if copy.blocking:
            self._recorder.orderings.host_is_held_up()
            return
        if copy.to_host and func is aten._to_copy.default:
            self._recorder.pin(result)
            return
        host = result if copy.to_host else args[1] if func is aten.copy_.default else args[0]
        is_pinned = self._recorder.place_of(host) in ("pinned", "managed") or was_pinned_elsewhere(host)
        copy.blocking = not is_pinned and (copy.to_host or copy.num_bytes > SENT_AT_ONCE_BYTES)
        if copy.blocking:
            self._say(
                f"{asking_line()}: a copy with non_blocking=True lets the host wait, as its memory there is not pinned"
            )
