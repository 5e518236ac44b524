"""Data loaders while tracing: what they fetch has values.

A loader without workers is traced, with all values computed. The work of workers is done in this process, outside the
trace.

Worker processes would inherit the trace, and could not send tensors without values. What they do on the host takes
neither the device's memory nor the time of the thread that launches kernels, so nothing of it is recorded, and data is
what it would be: rows that are read, cropped and collated have values. Only tensors that the program has made without
values, such as those of a ``TensorDataset``, stay without.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _pop_mode, _push_mode
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker

from lowmem_ft.foundation.upstream.patches import existing, replace, wrap
from lowmem_ft.virtual_gpu.values.constant_propagation import all_values

if TYPE_CHECKING:
    from typing_extensions import Self


def workers_in_this_process(undo: contextlib.ExitStack) -> None:
    """Let data loaders fetch their batches here, with values, until a stack is undone."""
    wrap(undo, DataLoader, "_get_iterator", _iterator_here)


def _iterator_here(make: Callable[[DataLoader[Any]], Any], loader: DataLoader[Any]) -> Any:
    if loader.num_workers:
        return _OneWorker(make, loader)
    batches = make(loader)
    fetcher = existing(batches, "_dataset_fetcher")
    fetcher.fetch = all_values()(fetcher.fetch)
    return batches


class _OneWorker:
    """The batches of a loader with workers, all of them from one that sees itself as the only one.

    Args:
        make: makes the iterator of a loader without workers.
        loader: the loader.
    """

    def __init__(self, make: Callable[[DataLoader[Any]], Any], loader: DataLoader[Any]) -> None:
        self._make = make
        self._loader = copy.copy(loader)
        self._loader.num_workers, self._loader.timeout = 0, 0
        self._info = worker.WorkerInfo(id=0, num_workers=1, seed=torch.initial_seed(), dataset=loader.dataset)
        if loader.worker_init_fn is not None:
            with self._at_work():
                loader.worker_init_fn(0)
        self._reset(loader)

    def _reset(self, loader: DataLoader[Any]) -> None:
        """Begin an epoch; torch notifies persistent workers of it."""
        with self._at_work():
            self._batches = self._make(self._loader)
        fetcher = existing(self._batches, "_dataset_fetcher")
        fetcher.fetch = functools.partial(self._fetch, fetcher.fetch)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return next(self._batches)

    def __len__(self) -> int:
        return len(self._batches)

    def _fetch(self, fetch: Callable[[Any], Any], index: Any) -> Any:
        with self._at_work():
            return fetch(index)

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        with computed_for_real(), contextlib.ExitStack() as undo:
            replace(undo, worker, "_worker_info", self._info)
            yield


@contextlib.contextmanager
def computed_for_real() -> Iterator[None]:
    """Compute in a block as without a trace, except with tensors that have no values: those are traced as ever."""
    with contextlib.ExitStack() as undo:
        modes: Any = undo.enter_context(_disable_current_modes())
        wrap(undo, FakeTensor, "__torch_dispatch__", _Traced(modes))
        yield


class _Traced:
    """Runs operators of tensors without values in the modes that were active before.

    Args:
        modes: the modes, the last one first.
    """

    def __init__(self, modes: list[TorchDispatchMode]) -> None:
        self._modes = modes
        self._is_tracing = False

    def __call__(
        self,
        dispatch: Callable[..., Any],
        cls: type,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        if self._is_tracing:
            return dispatch(cls, func, types, args, kwargs or {})
        self._is_tracing = True
        for mode in reversed(self._modes):
            _push_mode(mode)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            for _ in self._modes:
                _pop_mode()
            self._is_tracing = False
