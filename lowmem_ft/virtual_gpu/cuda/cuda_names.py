"""``cuda`` means the virtual GPU in a block, so that programs that name it, or check for it, run unchanged.

Three kinds of names lead there: functions and classes of ``torch.cuda``, the autocast state, and devices that tensors
and arrays are moved to. (Devices that tensors are *made* on pass through
:class:`~lowmem_ft.virtual_gpu.upstream.fake_tensor_patches.FakeMode`.) The tensors themselves report ``vgpu``: only
code that looks at ``tensor.is_cuda`` or ``tensor.device.type`` sees a difference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.cuda.nccl
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import _init_utils
from torch.distributed.tensor import _random as dtensor_random
from torch.nn.attention import flex_attention
from torch.utils._device import _device_constructors

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.upstream.patches import existing, loaded_module, replace, wrap
from lowmem_ft.foundation.virtual_device import DEVICE_TYPE
from lowmem_ft.virtual_gpu.calls.active import active_gpu
from lowmem_ft.virtual_gpu.calls.device_index import device_index
from lowmem_ft.virtual_gpu.cuda.cuda_classes import classes_of_cuda
from lowmem_ft.virtual_gpu.cuda.cuda_refusals import cuda_without_hardware
from lowmem_ft.virtual_gpu.device.device import VirtualBackend
from lowmem_ft.virtual_gpu.upstream.inference_mode import inference_mode_as_no_grad

CUDA = "cuda"

_ASK_FOR_AUTOCAST = "is_autocast_enabled get_autocast_dtype set_autocast_enabled set_autocast_dtype"
_OF_ACCELERATOR = (
    "empty_cache empty_host_cache memory_stats memory_allocated max_memory_allocated memory_reserved "
    "max_memory_reserved reset_accumulated_memory_stats reset_peak_memory_stats current_stream set_stream synchronize "
    "get_memory_info"
)
_MAKE_OF_VALUES = (
    *((torch, name) for name in ("tensor", "as_tensor", "asarray")),
    (Tensor, "new_tensor"),
)
"""Functions that copy an array to the device by ``Tensor.to`` in C++, which asks CUDA itself for ``cuda``'s index."""

CUDA_VERSION = "12.6"
"""Version of CUDA that ``torch.version.cuda`` names: the newest for which torch is built for every GPU since Volta."""

NCCL_VERSION = (2, 27, 3)
"""Version that ``torch.cuda.nccl.version()`` returns: that of torch 2.9 and later."""

_OURS = ("stands_for", "register_host_memory", "host_may_use")
"""Attributes that CUDA lacks: for foundation/devices.py, foundation/host/pinned_memory.py, streamed weights."""

_REMEMBER_ANSWERS = ("transformers.utils.import_utils", "accelerate.utils.imports")
"""Modules that check once whether there is a GPU, and cache the answer."""


def cuda_is_virtual(undo: contextlib.ExitStack, backend: VirtualBackend) -> None:
    """Let ``cuda`` mean the virtual GPU until a stack is undone; afterwards it means the same as before.

    Args:
        undo: undoes it.
        backend: the module of the virtual device.
    """
    undo.callback(_forget_answers)
    for module in (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.graphs):
        _lend_functions(undo, module, backend)
    for name in _OURS:
        setattr(torch.cuda, name, getattr(backend, name))
        undo.callback(delattr, torch.cuda, name)
    _lend_to_accelerator(undo, backend)
    replace(undo, torch.version, "cuda", CUDA_VERSION)
    replace(undo, torch.cuda.nccl, "version", lambda: NCCL_VERSION)
    cuda_without_hardware(undo)
    classes_of_cuda(undo)
    inference_mode_as_no_grad(undo)
    wrap(undo, flex_attention, "_validate_device", _no_flex_attention)
    for name in _ASK_FOR_AUTOCAST.split():
        wrap(undo, torch, name, _of_virtual_device)
    wrap(undo, Tensor, "to", _moved)
    replace(undo, Tensor, "cuda", _to_virtual_device)
    _device_constructors()  # else torch would cache the block's functions for `with torch.device(...)`
    for owner, name in _MAKE_OF_VALUES:
        wrap(undo, owner, name, _made)
    wrap(undo, DeviceMesh, "__init__", _of_devices)
    wrap(undo, _init_utils, "_get_device_from_device_id", lambda find, *args: on_virtual_device(find(*args)))
    # DTensor makes its RNG tracker for one device, and keeps it for good.
    replace(undo, dtensor_random, "_rng_tracker", None)
    replace(undo, Tensor, "record_stream", _record_stream)
    replace(undo, torch.cuda, "_sleep", _sleep)
    undo.enter_context(another_process_to_accelerate())
    _forget_answers()


def on_virtual_device(device: Any) -> Any:
    """Return the virtual device if a CUDA device is named, the processor without its index, and all else as it is.

    Raises:
        UserError: for a second CUDA device.
    """
    if not (isinstance(device, torch.device) or (isinstance(device, str) and device.startswith(CUDA))):
        return device
    named = torch.device(device)
    if named.type != CUDA:
        return without_index(device)
    return torch.device(DEVICE_TYPE, device_index(named))


def without_index(device: Any) -> Any:
    """Return a device as tensors report it: the processor's has no index, by whatever name a program asks for it."""
    is_indexed = isinstance(device, torch.device) and device.type == "cpu" and device.index is not None
    return torch.device("cpu") if is_indexed else device


def _lend_functions(undo: contextlib.ExitStack, module: ModuleType, backend: VirtualBackend) -> None:
    for name in dir(backend):
        if name == "is_initialized" or name.startswith("_") or not hasattr(module, name):
            continue  # torch.cuda stays uninitialised: nothing may look for a driver
        replace(undo, module, name, getattr(backend, name))


def _lend_to_accelerator(undo: contextlib.ExitStack, backend: VirtualBackend) -> None:
    """Replace functions of ``torch.accelerator``, which query the device's allocator: a device in Python has none."""
    for module in (torch.accelerator, torch.accelerator.memory):
        for name in _OF_ACCELERATOR.split():
            if hasattr(module, name):
                replace(undo, module, name, getattr(backend, name.replace("get_memory_info", "mem_get_info")))


def _no_flex_attention(validate: Callable[..., None], query: Tensor, *others: Tensor) -> None:
    """Refuse FlexAttention: torch.compile writes its kernel in Triton for each program."""
    if query.device.type == DEVICE_TYPE:
        raise UserError(
            "FlexAttention is a kernel that torch.compile writes, which is not modelled, got a call of it on a "
            "virtual GPU. Use scaled_dot_product_attention while tracing (`attn_implementation='sdpa'` in "
            "transformers): where its flash kernel serves the call, it keeps as many bytes."
        )
    validate(query, *others)


def _of_virtual_device(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of ``torch`` about the autocast state of a device type, which is CUDA if none is given."""
    named = kwargs.pop("device_type", None)
    if named is None and args and isinstance(args[0], str):
        named, args = args[0], args[1:]
    return function(DEVICE_TYPE if named in (None, CUDA) else named, *args, **kwargs)


def _moved(to: Callable[..., Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if args:
        args = (on_virtual_device(args[0]), *args[1:])
    elif "device" in kwargs:
        kwargs["device"] = on_virtual_device(kwargs["device"])
    return to(tensor, *args, **kwargs)


def _made(make: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    if "device" in kwargs:
        kwargs["device"] = on_virtual_device(kwargs["device"])
    return make(*args, **kwargs)


def _of_devices(
    make: Callable[..., None], mesh: DeviceMesh, device_type: str, *args: Any, **kwargs: Any
) -> None:
    """Make a ``DeviceMesh``, whose device type FSDP2 compares with that of tensors."""
    make(mesh, DEVICE_TYPE if device_type == CUDA else device_type, *args, **kwargs)


def _to_virtual_device(self: Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Tensor:
    """Move as ``Tensor.cuda`` does."""
    return self.to("cuda" if device is None else torch.device(device), non_blocking=non_blocking, **kwargs)


def _record_stream(self: Tensor, stream: Any) -> None:
    """Record as ``Tensor.record_stream`` does, which takes torch's own streams only."""
    active_gpu().recorder.orderings.record_stream(self, stream.id)


def _sleep(cycles: int) -> None:
    """Stand for ``torch.cuda._sleep``, a kernel without memory; the delay of its stream is not modelled."""


def no_accelerator(undo: contextlib.ExitStack) -> None:
    """Let torch see a machine without an accelerator: it keeps the virtual device that a process has had for good."""
    replace(undo, torch._C, "_get_accelerator", lambda *_: torch.device("cpu"))
    replace(undo, torch._C, "_accelerator_getAccelerator", lambda: None)


@contextlib.contextmanager
def another_process_to_accelerate() -> Iterator[None]:
    """Let accelerate choose its device again in a block: it does so once in a process, and keeps it."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    shared = [existing(state, "_shared_state") for state in (PartialState, AcceleratorState, GradientState)]
    before = [dict(state) for state in shared]
    for state in shared:
        state.clear()
    try:
        yield
    finally:
        for state, values in zip(shared, before, strict=True):
            state.clear()
            state.update(values)


def _forget_answers() -> None:
    """Let libraries check again whether there is a GPU."""
    for module in filter(None, map(loaded_module, _REMEMBER_ANSWERS)):
        for function in vars(module).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()
