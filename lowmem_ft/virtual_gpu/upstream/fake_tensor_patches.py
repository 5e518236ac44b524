"""Patches that keep torch and transformers from treating fake tensors differently from real ones.

Each patch lasts until a stack is undone.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import _disable_current_modes

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.upstream.patches import existing, loaded_module, replace, wrap
from lowmem_ft.virtual_gpu.calls.fake_results import tensors_in
from lowmem_ft.virtual_gpu.calls.type_names import device_of
from lowmem_ft.virtual_gpu.values.constant_propagation import known_values, set_values

if TYPE_CHECKING:
    from typing_extensions import Self

aten = torch.ops.aten

_PINNED = "was pinned elsewhere"
"""Attribute set on a real tensor."""

_TAKE_A_STORAGE = frozenset({aten.set_.source_Storage, aten.set_.source_Storage_storage_offset})
"""Operators not to cache: torch's cache of fake results, keyed by arguments, would keep the storage for ever."""


class FakeMode(FakeTensorMode):
    """Fake tensors whose known values never leave the host: ``torch.tensor([4], device="vgpu")`` copies nothing.

    Args:
        device_of: maps the device that a program names to the one to make a tensor on.
    """

    def __init__(self, device_of: Callable[[Any], Any]) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._device_of = device_of
        self._may_cache = self.cache_enabled
        self._times_entered = 0

    def __enter__(self) -> Self:
        self._times_entered += 1
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._times_entered -= 1
        super().__exit__(*exception)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return itself: tensors hold their mode, and a copy of a tensor stays on this machine."""
        return self

    @property
    def is_asked_for_shapes(self) -> bool:
        """True if a library has entered the mode again, to learn what an operator returns: a run would compute nothing.

        DTensor does so for the whole tensor before it computes this rank's part.
        """
        return self._times_entered > 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if kwargs and "device" in kwargs:
            kwargs = {**kwargs, "device": self._device_of(kwargs["device"])}
        self.cache_enabled = self._may_cache
        if func in _TAKE_A_STORAGE:
            self.cache_enabled = False
            _refuse_real_memory(args[1])
        return super().__torch_dispatch__(func, types, args, kwargs or {})

    @property
    def avoid_device_init(self) -> bool:
        """True, as without a device: tensors are filled on the host and then copied."""
        return True


def _refuse_real_memory(storage: torch.UntypedStorage) -> None:
    """Raise before torch writes a tensor without values into memory that has some, or the other way round."""
    if storage.device.type != "meta":
        raise UserError(
            "A trace follows storages that its tensors have, and one tensor after another, got one of "
            f"{storage.nbytes():,} bytes that was made by itself or elsewhere, such as in another thread. Make a "
            "tensor and take its `untyped_storage()`; copy, move and fill tensors in place of storages."
        )


def fake_tensors_in_disguise(
    undo: contextlib.ExitStack,
    read_values: Callable[[Tensor], Tensor],
    list_values: Callable[[Tensor], Tensor],
) -> None:
    """Apply all of the patches below.

    Args:
        undo: undoes them.
        read_values: returns the values for a program that reads a whole fake tensor.
        list_values: returns them for one that reads a tensor as a list.
    """
    import_utils = loaded_module("transformers.utils.import_utils")
    if import_utils is not None:
        replace(undo, import_utils, "is_fake_tensor", _never)
    replace(undo, torch.utils, "swap_tensors", _swap_tensors)
    replace(undo, Tensor, "data", property(_data.__get__, _set_data))
    wrap(undo, torch.UntypedStorage, "data_ptr", _data_ptr)
    replace(undo, FakeTensor, "data_ptr", _address)
    wrap(undo, Tensor, "numpy", functools.partial(_numpy, read_values))
    wrap(undo, FakeTensor, "tolist", functools.partial(_tolist, list_values))
    replace(undo, FakeTensor, "share_memory_", _itself)
    replace(undo, FakeTensor, "__deepcopy__", _deepcopy)
    wrap(undo, Tensor, "__format__", _format)
    _device_constructors()  # else torch would cache the block's functions for `with torch.device(...)`
    for owner, name in ((torch, "tensor"), (torch, "as_tensor"), (torch, "asarray"), (Tensor, "new_tensor")):
        wrap(undo, owner, name, _made)
    wrap(undo, Tensor, "pin_memory", _pin_memory)
    replace(undo, nn.UninitializedParameter, "__new__", _refuse_lazy_layers)
    replace(undo, nn.UninitializedBuffer, "__new__", _refuse_lazy_layers)
    for name in (
        "torch.utils._foreach_utils",
        "torch.optim.optimizer",
    ):  # multi-tensor operators take these types
        types = existing(loaded_module(name), "_foreach_supported_types")
        types.append(FakeTensor)
        undo.callback(types.remove, FakeTensor)


def _data_ptr(data_ptr: Callable[..., int], storage: torch.UntypedStorage) -> int:
    """Return an address of its own for each storage without memory: libraries tell by it what tensors share."""
    return storage._cdata if storage.device.type == "meta" and storage.nbytes() else data_ptr(storage)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.element_size()


def _never(tensor: Any) -> bool:
    """Answer no: for a fake tensor, transformers builds masks in full, and so takes other attention kernels."""
    return False


def _itself(tensor: Tensor) -> Tensor:
    """Return the tensor, as ``share_memory_`` does for one on CUDA; on the host no other process sees a trace."""
    return tensor


def _swap_tensors(first: Tensor, second: Tensor) -> None:
    """Swap fake tensors, which torch refuses as they are weakly referenced; ``Module.to`` moves parameters by it."""
    # For CUDA a module assigns `parameter.data = moved`.
    if sys._getframe(1).f_code.co_name == "_apply":
        _take_place(first, second)
        return
    for name in ("__class__", "__dict__"):
        of_first, of_second = getattr(first, name), getattr(second, name)
        setattr(first, name, of_second)
        setattr(second, name, of_first)
    torch._C._swap_tensor_impl(first, second)


def _take_place(tensor: Tensor, moved: Tensor) -> None:
    """Turn a tensor into another one, but keep its own attributes and hooks."""
    hooks = {name: getattr(tensor, name) for name in _HOOKS}
    torch._C._swap_tensor_impl(tensor, moved)
    vars(tensor).update(vars(moved))
    for name, registered in hooks.items():
        if registered:
            setattr(tensor, name, registered)


def _deepcopy(tensor: FakeTensor, memo: dict[int, Any]) -> Tensor:
    """Copy a fake tensor and its known values, which ``copy.deepcopy`` would copy as if they were fake, too."""
    if id(tensor) in memo:
        return memo[id(tensor)]
    constant, tensor.constant = tensor.constant, None
    values = known_values(tensor)
    set_values(tensor, None)
    try:
        copied = Tensor.__deepcopy__(tensor, memo)
    finally:
        tensor.constant = constant
        set_values(tensor, values)
    with _disable_current_modes():
        set_values(copied, None if values is None else values.clone())
    return copied


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_data: Any = Tensor.data


def _set_data(tensor: Tensor, data: Tensor) -> None:
    """Assign ``tensor.data = data`` between the host and the device, which torch allows for CUDA and not for others.

    The tensor keeps its attributes and its hooks. On CUDA, a graph would notice, and a gradient would stay where it
    was.

    Raises:
        UserError: for a tensor with a gradient, or one that a graph or a view holds.
    """
    if isinstance(tensor, FakeTensor) != isinstance(data, FakeTensor):
        _refuse_real_memory((data if isinstance(tensor, FakeTensor) else tensor).untyped_storage())
    if not isinstance(tensor, FakeTensor) or torch._has_compatible_shallow_copy_type(tensor, data):
        _data.__set__(tensor, data)
        if isinstance(tensor, FakeTensor):
            set_values(tensor, known_values(data))
        return
    own = 1 + _is_copied_from(data, tensor)
    if tensor.grad is not None or tensor._use_count() > own:  # type: ignore[attr-defined]
        holder = "a graph or a view of it" if tensor.grad is None else "a gradient"
        raise UserError(
            "A virtual GPU follows `tensor.data = other` to another device only where nothing else depends on the "
            f"tensor, got {holder}. Delete what is left of the step before, such as the loss, and set tensor.grad = "
            "None."
        )
    moved = data.detach()
    if moved.is_floating_point() or moved.is_complex():
        moved.requires_grad_(tensor.requires_grad)
    _take_place(tensor, moved)


def _is_copied_from(data: Tensor, tensor: Tensor) -> bool:
    """Return whether the graph of ``data`` begins at a tensor: ``tensor.data = tensor.to(device)`` drops it at once."""
    node = data.grad_fn
    return node is not None and any(
        getattr(each, "variable", None) is tensor for each, _ in node.next_functions
    )


def _numpy(
    read_values: Callable[[Tensor], Tensor], numpy: Callable[..., Any], tensor: Tensor, *, force: bool = False
) -> Any:
    """Return ``Tensor.numpy`` of the values read."""
    if not (force or tensor.is_cpu or tensor.is_meta):
        raise TypeError(
            f"can't convert {device_of(tensor)} device type tensor to numpy. Use Tensor.cpu() to copy the tensor "
            "to host memory first."
        )
    if tensor.requires_grad and not force:
        raise RuntimeError(
            "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead."
        )
    values = read_values(tensor) if isinstance(tensor, FakeTensor) else tensor
    with _disable_current_modes():
        return numpy(values, force=force)


def _tolist(list_values: Callable[[Tensor], Tensor], tolist: Callable[[Tensor], Any], tensor: Tensor) -> Any:
    """Return ``FakeTensor.tolist``, which reads one element after the other, of the values read."""
    values = list_values(tensor)
    with unset_fake_temporarily():
        return values.tolist()


def _format(format_tensor: Callable[[Tensor, str], str], tensor: Tensor, format_spec: str) -> str:
    """Format ``f"{loss:.3f}"``, which torch supports for plain tensors only."""
    if isinstance(tensor, FakeTensor) and tensor.dim() == 0 and format_spec:
        return format(tensor.item(), format_spec)
    return format_tensor(tensor, format_spec)


def _refuse_lazy_layers(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
    raise UserError(
        "A trace makes weights with their sizes, got a layer such as LazyLinear, which makes them at the first batch. "
        "Name its inputs: torch.nn.Linear(in_features, out_features)."
    )


def _pin_memory(pin_memory: Callable[..., Tensor], tensor: Tensor, *args: Any) -> Tensor:
    """Pin a tensor; in other threads, such as a data loader's, tensors are real and get a mark."""
    is_traced = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None  # type: ignore[attr-defined]
    if is_traced:
        return pin_memory(tensor, *args)
    vars(tensor)[_PINNED] = True
    return tensor


def _made(make: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Make a tensor of others' numbers, which torch's C++ would read without asking a dispatch mode."""
    at = next((at for at, value in enumerate(args) if isinstance(value, (list, tuple))), None)
    if at is None or not any(isinstance(item, FakeTensor) for item in tensors_in(args[at])):
        return make(*args, **kwargs)
    types: list[torch.dtype] = []
    numbers = _read(args[at], types)
    if kwargs.get("dtype") is None:
        kwargs["dtype"] = functools.reduce(torch.promote_types, types)
    return make(*args[:at], numbers, *args[at + 1 :], **kwargs)


def _read(value: Any, types: list[torch.dtype]) -> Any:
    """Return what nested lists of tensors hold, and add the types of it all."""
    if isinstance(value, (list, tuple)):
        return [_read(item, types) for item in value]
    if isinstance(value, Tensor):
        types.append(value.dtype)
        return value.tolist()
    kind = torch.int64 if type(value) is int else torch.bool
    types.append(torch.get_default_dtype() if isinstance(value, float) else kind)
    return value


def was_pinned_elsewhere(tensor: Tensor) -> bool:
    """Return whether another thread has pinned a tensor that a program uses."""
    return _PINNED in vars(tensor)
