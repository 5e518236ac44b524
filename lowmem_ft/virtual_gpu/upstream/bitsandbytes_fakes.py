"""bitsandbytes while tracing: its own Python runs on fake tensors, except where it needs an address or CUDA's runtime.

Nothing here imports bitsandbytes: the patches apply once the program has imported it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lowmem_ft.foundation.upstream.import_hooks import when_imported
from lowmem_ft.foundation.upstream.patches import replace, wrap
from lowmem_ft.foundation.virtual_device import DEVICE_TYPE, activated
from lowmem_ft.virtual_gpu.calls.active import active_gpu
from lowmem_ft.virtual_gpu.kernels.bitsandbytes_operators import register_operator_steps
from lowmem_ft.virtual_gpu.upstream.bitsandbytes_weights import new_parameter


def bitsandbytes_on_virtual_gpu(undo: contextlib.ExitStack) -> None:
    """Let bitsandbytes work on fake tensors until a stack is undone, whether it is imported before or later."""
    when_imported(undo, "bitsandbytes", functools.partial(_adapt, undo), _on_a_machine_without_gpu)


@contextlib.contextmanager
def _on_a_machine_without_gpu() -> Iterator[None]:
    """Let bitsandbytes be imported as without a GPU: with one, it looks for CUDA's runtime."""
    with _disable_current_modes(), activated(None):
        yield


def _adapt(undo: contextlib.ExitStack, bitsandbytes: Any) -> None:
    from bitsandbytes import functional
    from bitsandbytes.nn import Int8Params, Params4bit
    from bitsandbytes.optim import optimizer

    register_operator_steps()

    # State that bitsandbytes keeps for the whole process must not keep fake tensors.
    replace(undo, functional, "name2qmap", {})
    replace(undo, functional.GlobalPageManager, "_instance", None)
    for parameter_class in (Params4bit, Int8Params):
        wrap(undo, parameter_class, "__new__", new_parameter)
    wrap(undo, functional, "create_dynamic_map", _computed)
    replace(undo, functional, "get_paged", _get_paged)
    replace(undo, functional, "fill", _fill_paged)
    replace(undo, functional, "prefetch_tensor", _prefetch_paged)
    replace(undo, optimizer, "sync_gpu", _synchronize)


def _computed(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Run a function that reads the tensors it makes, such as a table's, on real ones, and return a fake one."""
    with _disable_current_modes():
        values = function(*args, **kwargs).tolist()
    return torch.tensor(values)


def _get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device) -> Tensor:
    """Return managed memory, which is outside torch's pool; to torch it is a tensor on the CPU."""
    buffer: Any = torch.empty(shape, dtype=dtype)
    buffer.is_paged = True
    buffer.page_deviceid = device.index
    active_gpu().recorder.mark_place(buffer, "managed")
    return buffer


def _fill_paged(tensor: Tensor, value: float, device: Any = None, prefetch: bool = True) -> None:
    active_gpu().recorder.orderings.synchronize()


def _prefetch_paged(tensor: Tensor, to_cpu: bool = False) -> None:
    """Return at once: pages that fit stay on the device, and there is no need to move them."""


def _synchronize(tensor: Tensor) -> None:
    """Let the host wait for the device after each parameter's update."""
    if tensor.device.type == DEVICE_TYPE:
        active_gpu().recorder.orderings.synchronize()
