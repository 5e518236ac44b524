"""Host memory that a program has pinned itself, as ``cudaHostRegister`` does: nobody waits for copies when it goes."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lowmem_ft.virtual_gpu.recording.recorder import Recorder


class HostRegistration:
    """One of them, until its pages go or its trace ends.

    Args:
        recorder: of the trace.
        pages: whole ones, allocated by somebody else.
    """

    def __init__(self, recorder: Recorder, pages: torch.Tensor) -> None:
        recorder.mark_place(pages, "pinned")
        self._recorder = weakref.ref(recorder)  # memory is kept by those who keep traces, too
        self._index = recorder.index_of(pages)
        if recorder.checker is not None and self._index is not None:
            recorder.checker.registered(self._index)

    def synchronize(self) -> None:
        """Let the host wait for all streams of the GPU that it is registered with."""
        if (recorder := self._open_recorder()) is not None:
            recorder.orderings.synchronize()

    def unregister(self) -> None:
        """As ``cudaHostUnregister``."""
        recorder = self._open_recorder()
        if recorder is not None and recorder.checker is not None and self._index is not None:
            recorder.checker.gives_back(self._index, "cudaHostUnregister")

    def _open_recorder(self) -> Recorder | None:
        recorder = self._recorder()
        return None if recorder is None or recorder.is_closed else recorder
