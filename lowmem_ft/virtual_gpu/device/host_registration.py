"""Host memory that a program pins itself, as with ``cudaHostRegister``: freeing it does not wait for copies."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lowmem_ft.virtual_gpu.recording.recorder import Recorder


class HostRegistration:
    """A registration, valid until its pages are freed or its trace ends.

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
