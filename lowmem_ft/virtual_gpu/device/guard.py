"""The guard that tells C++ which device it is on, and that lets exceptions of hooks through.

While an exception of a hook (``Tensor.register_hook`` and its like) leaves autograd's engine, it stays CPython's
current error, and the engine asks the guard for its device to put the stream back. A Python method that returns then
breaks CPython's rule that a result and an error exclude each other, and the engine, which may not throw there, ends the
process by ``std::terminate``. So the guard takes the exception, and the backward pass raises it at its end.

After an error, the engine keeps the graph in its queue, where a GPU's own thread would empty it; so this does, too.

Source: pytorch, torch/csrc/acc/Module.cpp (PythonDeviceGuard), torch/csrc/autograd/engine.cpp (evaluate_function).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C._acc import DeviceGuard
from torch._C._autograd import DeviceType
from torch.utils._python_dispatch import _disable_current_modes

from lowmem_ft.foundation.tensors.autograd_queue import EngineQueue
from lowmem_ft.foundation.tensors.backward_detection import is_in_backward
from lowmem_ft.foundation.upstream.patches import wrap

_raise_current_error = ctypes.pythonapi.Py_IsInitialized
"""Any function of Python's C API does it: ``ctypes.PyDLL`` looks for the current error after each call."""

_taken: list[BaseException] = []


class VirtualDeviceGuard(DeviceGuard):
    """The guard of the one device that there is."""

    def type_(self) -> Any:
        """Return the device's type, after the current error has been taken, if there is one."""
        try:
            _raise_current_error()
        except BaseException as error:  # whatever a hook has raised
            if not is_in_backward():
                raise
            _taken.append(error)
        return DeviceType.PrivateUse1


@contextlib.contextmanager
def errors_of_hooks_raised() -> Iterator[None]:
    """Let each backward pass of a block raise the exception that the guard has taken from it."""
    queue = EngineQueue(torch.device("cpu"))
    with contextlib.ExitStack() as undo:
        wrap(undo, torch.autograd, "_engine_run_backward", functools.partial(_run_and_empty, queue))
        yield


def _run_and_empty(queue: EngineQueue, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return _run_backward(run, *args, **kwargs)
    except BaseException:
        if not is_in_backward():  # within another pass, that one's nodes are in the queue
            with _disable_current_modes():
                queue.empty()
        raise


def _run_backward(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a backward pass, and raise what was taken from it: the engine fails without an error, a ``SystemError``."""
    before = len(_taken)
    try:
        result = run(*args, **kwargs)
    except SystemError as error:
        raised: BaseException = _taken.pop() if len(_taken) > before else error
    except BaseException:
        del _taken[before:]  # the engine had an error of its own to raise
        raise
    else:
        if len(_taken) == before:
            return result
        raised = _taken.pop()
    try:
        raise raised
    finally:
        del raised  # else this frame and its error would keep each other, and the tensors of all frames
