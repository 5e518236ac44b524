"""Devices that the tensors of one call may be on: CUDA's own rules and error messages.

torch calls a kernel of CUDA through a wrapper that it generates from ``native_functions.yaml``. Unless an operator
says ``device_check: NoCheck`` there, all its tensors have to be on one device, 0-dimensional ones too. Those
that do say it check by themselves: ``index`` takes indices from the host, ``_foreach_*`` goes tensor by tensor,
``copy_`` takes anything, and the others take a 0-dimensional tensor from the host, which fake tensors know.

Source: torchgen/dest/register_dispatch_key.py; aten/src/ATen/core/op_registration/adaption.cpp and
native/TensorAdvancedIndexing.cpp.
"""

from __future__ import annotations

import functools
import importlib.resources
import re
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from lowmem_ft.virtual_gpu.calls.fake_results import tensors_in
from lowmem_ft.virtual_gpu.calls.type_names import class_of, device_of
from lowmem_ft.virtual_gpu.cuda.cuda_classes import device_of_generator

aten = torch.ops.aten

_INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})


def check_devices(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check that CUDA accepts a call whose tensors are on two devices.

    Args:
        func: the operator, one of torch's own.
        args: its arguments.
        kwargs: its keyword arguments.

    Raises:
        RuntimeError: as CUDA does.
    """
    arguments = [*zip([one.name for one in func._schema.arguments], args, strict=False), *kwargs.items()]
    name = func._opname
    if name in _INDEXING:
        _check_indices(args[0], args[1])
    elif name.startswith("_foreach_") and name != "_foreach_copy_":
        _check_each([value for _, value in arguments])
    elif func is aten.convolution.default:
        check_convolution(args, lambda tensor: tensor.device)
    else:
        wrapper = _checking_wrappers().get(str(func).removeprefix("aten.").removesuffix(".default"))
        if wrapper is not None:
            _check_arguments(wrapper, arguments)


def check_generator(generator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Check that random numbers are drawn on the device of the result.

    Raises:
        RuntimeError: as torch does.
    """
    tensor = next(tensors_in((args,)), None)
    device = kwargs.get("device") or ("cpu" if tensor is None else tensor.device)
    wanted, found = (
        "cpu" if one.type == "cpu" else "cuda"
        for one in (torch.device(device), device_of_generator(generator))
    )
    if wanted != found:
        raise RuntimeError(f"Expected a '{wanted}' device type for generator but found '{found}'")


def _check_indices(indexed: Tensor, indices: Sequence[Tensor | None]) -> None:
    for index in indices:
        if index is not None and index.device not in (indexed.device, torch.device("cpu")):
            raise RuntimeError(
                "indices should be either on cpu or on the same device as the indexed tensor "
                f"({device_of(indexed)})"
            )


def _check_each(values: list[Any]) -> None:
    """Check as the slow path of ``_foreach_*`` does: one operator for each position of the lists."""
    lists = [value for value in values if isinstance(value, (list, tuple)) and list(tensors_in(value))]
    single = [value for value in values if isinstance(value, Tensor)]
    for group in zip_longest(*lists):
        first, *others = (one for one in (*group, *single) if isinstance(one, Tensor))
        for other in others:
            is_number = other.device.type == "cpu" and other.dim() == 0
            if other.device != first.device and not is_number:
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices, "
                    f"{device_of(first)} and {device_of(other)}!"
                )


def check_convolution(args: Sequence[Any], of: Callable[[Tensor], object]) -> None:
    """Check as convolutions do that weight and bias have the input's device, or its type.

    Raises:
        RuntimeError: as torch does.
    """
    first = args[0]
    for name, other in zip(("weight", "bias"), args[1:3], strict=False):
        if other is not None and of(other) != of(first):
            raise RuntimeError(
                f"Input type ({class_of(first)}) and {name} type ({class_of(other)}) should be the same"
            )


def _check_arguments(wrapper: str, arguments: list[tuple[str, Any]]) -> None:
    common: Tensor | None = None
    for name, value in arguments:
        for tensor in tensors_in((value,)):
            common = tensor if common is None else common
            if tensor.device != common.device:
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but got {name} is on "
                    f"{device_of(tensor)}, different from other tensors on {device_of(common)} "
                    f"(when checking argument in method {wrapper})"
                )


@functools.cache
def _checking_wrappers() -> dict[str, str]:
    """Return the operators whose CUDA wrappers check devices, and the names of those wrappers.

    The file is read only when a call has tensors on two devices, which is rare.
    """
    found: dict[str, str] = {}
    folder = importlib.resources.files("torchgen") / "packaged" / "ATen" / "native"
    text = (folder / "native_functions.yaml").read_text(encoding="utf-8")
    for block in re.split(r"^- func: ", text, flags=re.MULTILINE)[1:]:
        name = block[: block.index("(")]
        has_kernel = re.search(r"^    [\w, ]*\bCUDA\b[\w, ]*:", block, flags=re.MULTILINE)
        is_structured = re.search(r"^  structured(_delegate)?:", block, flags=re.MULTILINE)
        if (has_kernel or is_structured) and "device_check: NoCheck" not in block:
            base, _, overload = name.partition(".")
            found[name] = f"wrapper_CUDA_{base if is_structured else f'{overload}_{base}'}"
    return found
