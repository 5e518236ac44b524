"""Files that a script saves and reads back: tensors are saved as shapes, and loaded as tensors of these shapes.

Files are written in the temporary folder of ``temporary_files.py``. Objects are pickled as torch does it; for a tensor,
its shape, type and device are kept, and its values where the trace knows them, such as a step's number.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import pickle
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from lowmem_ft.foundation.upstream.import_hooks import when_imported
from lowmem_ft.foundation.upstream.patches import wrap, wrap_wherever_imported
from lowmem_ft.virtual_gpu.values.constant_propagation import known_values, set_values

if TYPE_CHECKING:
    from typing_extensions import Self

_MAGIC = b"lowmem_ft tensors without values\n"


def save_shapes(undo: contextlib.ExitStack) -> None:
    """Let ``torch.save`` and safetensors write shapes, and read them back, until a stack is undone."""
    wrap(undo, torch, "save", lambda save, *args, **kwargs: _save(*args, **kwargs))
    wrap(undo, torch, "load", _load)

    for module, name, around in (
        ("safetensors.torch", "save_file", _save_file),
        ("safetensors", "safe_open", _safe_open),
    ):
        when_imported(undo, module, partial(wrap_wherever_imported, undo, name=name, around=around))


class _Pickler(pickle.Pickler):
    """Writes a tensor as the arguments that make one like it; tensors that share memory are written as one."""

    def __init__(self, file: Any) -> None:
        super().__init__(file, protocol=4)
        self._numbers: dict[Any, int] = {}
        self._kept: list[Tensor] = []  # keeps tensors alive, or another would get a number that is free again

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return None
        self._kept.append(obj)
        place = (obj.untyped_storage()._cdata, obj.storage_offset(), tuple(obj.shape), obj.stride())
        values = known_values(obj)
        return {
            "number": self._numbers.setdefault(place, len(self._numbers)),
            "shape": tuple(obj.shape),
            "stride": obj.stride(),
            "dtype": obj.dtype,
            "device": str(obj.device),
            "requires_grad": obj.requires_grad and obj.is_leaf,
            "is_parameter": isinstance(obj, nn.Parameter),
            "values": None if values is None else values.tolist(),
        }


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, place: Callable[[str], Any]) -> None:
        super().__init__(file)
        self._place = place
        self._made: dict[int, Tensor] = {}

    def persistent_load(self, pid: Any) -> Any:
        number = pid["number"]
        if number not in self._made:
            self._made[number] = _made(pid, self._place(pid["device"]))
        tensor = self._made[number].detach()
        if pid["is_parameter"]:
            return nn.Parameter(tensor, requires_grad=pid["requires_grad"])
        return tensor.requires_grad_(pid["requires_grad"]) if pid["requires_grad"] else tensor


def _made(saved: Mapping[str, Any], device: Any) -> Tensor:
    tensor = torch.empty_strided(saved["shape"], saved["stride"], dtype=saved["dtype"], device=device)
    if saved["values"] is not None:
        with unset_fake_temporarily():
            values = torch.tensor(saved["values"], dtype=saved["dtype"])
        set_values(tensor, values)
    return tensor


def _place_by(map_location: Any) -> Callable[[str], Any]:
    """Return a function from the device that a tensor was saved on to the one where ``torch.load`` would put it."""
    if map_location is None:
        return lambda device: device
    if isinstance(map_location, Mapping):
        return lambda device: map_location.get(device, device)
    if callable(map_location):  # it receives the storage on the host, and most return it unchanged
        return lambda device: "cpu"
    return lambda device: map_location


def _opened(file: Any, mode: str) -> AbstractContextManager[Any]:
    is_path = isinstance(file, (str, bytes, os.PathLike))
    return builtins.open(file, mode) if is_path else contextlib.nullcontext(file)


def _save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
    with _opened(f, "wb") as file:
        file.write(_MAGIC)
        _Pickler(file).dump(obj)


def _load(load: Callable[..., Any], f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Load a file saved here; leave other files to ``load``."""
    if not is_saved_here(f):
        return load(f, map_location, *args, **kwargs)
    with _opened(f, "rb") as file:
        file.read(len(_MAGIC))
        return _Unpickler(file, _place_by(map_location)).load()


def _save_file(save: object, tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
    _save(tensors, filename)


def is_saved_here(file: Any) -> bool:
    """Return whether a file, by its path or opened, was saved here."""
    if not isinstance(file, (str, bytes, os.PathLike)):
        begin = file.tell()
        is_here = file.read(len(_MAGIC)) == _MAGIC
        file.seek(begin)
        return is_here
    with contextlib.suppress(OSError), builtins.open(file, "rb") as opened:
        return opened.read(len(_MAGIC)) == _MAGIC
    return False


class _OpenedShapes:
    """A file that was saved here, as safetensors opens one: each tensor is made when it is asked for."""

    def __init__(self, filename: Any, device: Any) -> None:
        self._shapes: dict[str, Tensor] = torch.load(filename, "meta")
        self._device = device

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def metadata(self) -> dict[str, str]:
        return {"format": "pt"}

    def keys(self) -> list[str]:
        return list(self._shapes)

    def get_tensor(self, name: str) -> Tensor:
        return torch.empty_like(self._shapes[name], device=self._device)

    def get_tensors(self) -> dict[str, Tensor]:
        return {name: self.get_tensor(name) for name in self._shapes}


def _safe_open(
    open_file: Callable[..., Any], filename: Any, framework: str, device: Any = "cpu", **kwargs: Any
) -> Any:
    if is_saved_here(filename):
        return _OpenedShapes(filename, device)
    return open_file(filename, framework, device, **kwargs)
