"""Classes of torch that construct an object for a device: for the virtual GPU they construct a virtual one.

``torch.Generator("cuda")``, ``torch.Stream(device="cuda")`` and ``torch.cuda.FloatTensor(3)`` are calls of classes, and
remain classes for programs that check ``isinstance``.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowmem_ft.foundation.upstream.patches import replace, wrap
from lowmem_ft.foundation.virtual_device import DEVICE_TYPE
from lowmem_ft.virtual_gpu.calls.device_index import device_index
from lowmem_ft.virtual_gpu.calls.type_names import TYPE_NAMES
from lowmem_ft.virtual_gpu.device.streams import VirtualEvent, VirtualStream

_Generator = torch.Generator


class _VirtualGenerator(_Generator):
    """A generator of the host under another name: it can be seeded and its state saved, but it draws no numbers."""

    def __init__(self) -> None:
        _virtual_generators[_address(self)] = self

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The virtual GPU."""
        return torch.device(DEVICE_TYPE, 0)


_virtual_generators: weakref.WeakValueDictionary[int, _VirtualGenerator] = weakref.WeakValueDictionary()
"""Generators by address, as an operator gets another Python object for the one passed to it."""


def device_of_generator(generator: torch.Generator) -> torch.device:
    """Return the device for which a generator draws, given the generator as an operator sees it."""
    return _virtual_generators.get(_address(generator), generator).device


def _address(generator: Any) -> int:
    return generator._cdata


def classes_of_cuda(undo: contextlib.ExitStack) -> None:
    """Let a program make generators, streams, events and typed tensors for the virtual GPU until a stack is undone."""
    replace(undo, torch, "Generator", _chosen_by_device(torch.Generator, _VirtualGenerator, "cpu"))
    replace(undo, torch.cuda, "default_generators", (_VirtualGenerator(),))
    replace(undo, torch, "Stream", _chosen_by_device(torch.Stream, VirtualStream, None))
    replace(undo, torch, "Event", _chosen_by_device(torch.Event, VirtualEvent, None))
    typed: dict[str, type] = {}
    for dtype, type_name in TYPE_NAMES.items():
        name = f"{type_name}Tensor"
        if hasattr(torch.cuda, name):
            typed[name] = _typed_tensor(dtype)
            replace(undo, torch.cuda, name, typed[name])
    wrap(undo, Tensor, "type", functools.partial(_with_type, typed))


def _is_virtual(device: Any) -> bool:
    if device is None or (not isinstance(device, int) and torch.device(device).type in ("cuda", DEVICE_TYPE)):
        device_index(device)
        return True
    return False


def _chosen_by_device(real: Any, virtual: type, default: Any) -> type:
    """Return a class that makes a real or a virtual object, depending on the device, and is the type of both."""

    class Chooses(type):
        def __call__(cls, device: Any = default, **options: Any) -> Any:
            return virtual(**options) if _is_virtual(device) else real(device, **options)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, (real, virtual))

    return Chooses(real.__name__, (), {"__doc__": real.__doc__})


def _typed_tensor(dtype: torch.dtype) -> type:
    """Return ``torch.cuda.FloatTensor`` or the like, which takes sizes or values."""

    class OfType(type):
        def __call__(cls, *content: Any) -> Tensor:
            device = torch.device(DEVICE_TYPE, 0)
            if len(content) == 1 and not isinstance(content[0], (int, torch.Size)):
                return torch.as_tensor(content[0], dtype=dtype, device=device)
            return torch.empty(*content or (0,), dtype=dtype, device=device)

        def __instancecheck__(cls, instance: Any) -> bool:
            is_virtual = isinstance(instance, Tensor) and instance.device.type == DEVICE_TYPE
            return is_virtual and instance.dtype == dtype

    return OfType("Tensor", (), {"dtype": dtype})


def _with_type(
    typed: dict[str, Any],
    to_type: Callable[..., Any],
    tensor: Tensor,
    dtype: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call ``Tensor.type``, which takes such a class or its name."""
    if isinstance(dtype, str):
        dtype = typed.get(dtype.removeprefix("torch.cuda."), dtype)
    if dtype in typed.values():
        return tensor.to(torch.device(DEVICE_TYPE, 0), dtype.dtype, *args, **kwargs)
    return to_type(tensor) if dtype is None else to_type(tensor, dtype, *args, **kwargs)
