"""One operator as work for the clock: a kernel with its operations and bytes, or a copy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowmem_ft.foundation.tensors.operator_costs import registered_cost
from lowmem_ft.virtual_gpu.calls.fake_results import tensors_in
from lowmem_ft.virtual_gpu.calls.work import Work
from lowmem_ft.virtual_gpu.costs.collectives import COLLECTIVE_LIBRARIES, bytes_copied, collective_of
from lowmem_ft.virtual_gpu.costs.flops import flops_of, is_free
from lowmem_ft.virtual_gpu.costs.launches import launches_of
from lowmem_ft.virtual_gpu.costs.shapes import shape_of

aten = torch.ops.aten

_COPIES = frozenset({aten._to_copy.default, aten.copy_.default})
_READ_ROWS = frozenset(
    {aten.embedding.default, aten.index_select.default, aten.index.Tensor, aten.gather.default}
)
"""Operators that read as many bytes as they write, however large the table is."""

LEAST_HOST_COPY_BYTES = 2**20
"""Bytes from which a copy within host memory counts: pieces of data kept there, not the numbers of a batch."""

ADD_TO_WIDER = frozenset({aten.addmm.dtype, aten.addmm.dtype_out})
"""Products whose first argument, to which they are added, has another type than the factors."""


def work_of(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
    *,
    device_type: str,
) -> Work | None:
    """Return what an operator asks of the device, or None if it asks nothing.

    Args:
        func: the operator.
        args: its arguments.
        kwargs: its keyword arguments.
        result: what it returned.
        device_type: type of the device.

    Returns:
        An entry for the log, at position 0 and on stream 0; for work of the host alone, only large copies.
    """
    if is_free(func):
        return None
    inputs = list(tensors_in((args, [value for name, value in kwargs.items() if name != "out"])))
    results = list(tensors_in((result,)))
    devices = {tensor.device.type for tensor in (*inputs, *results)}
    name = str(func._opname)
    if device_type not in devices:
        is_large = func is aten.copy_.default and result.nbytes >= LEAST_HOST_COPY_BYTES
        return Work("host copy", position=0, name=name, num_bytes=result.nbytes) if is_large else None
    if getattr(func, "namespace", None) in COLLECTIVE_LIBRARIES:
        collective = collective_of(func, args)
        if collective is not None:
            return collective
    if func in _COPIES and len(devices) > 1:
        non_blocking = kwargs.get("non_blocking", len(args) > 2 and args[2])
        on_device = next(tensor for tensor in (*results, *inputs) if tensor.device.type == device_type)
        return Work(
            "copy",
            position=0,
            name=name,
            num_bytes=on_device.nbytes,
            blocking=not non_blocking,
            to_host=results[0].device.type != device_type,
        )
    cost = registered_cost(func)
    num_bytes = bytes_copied(func, args, kwargs)
    if num_bytes is None:
        num_bytes = _bytes_moved(func, inputs, results) if cost is None else cost.moved_bytes(*args, **kwargs)
    flops = flops_of(func, args, kwargs, result)
    return Work(
        "kernel",
        position=0,
        name=name,
        flops=flops,
        dtype=_product_dtype(func, [*inputs[func in ADD_TO_WIDER :], *results]) if flops else "",
        num_bytes=num_bytes,
        launches=launches_of(func, args, kwargs, result) if cost is None else cost.launches(*args, **kwargs),
        shape=shape_of(func, args, kwargs, result, flops) if flops else (),
    )


def _bytes_moved(func: Any, inputs: list[Tensor], results: list[Tensor]) -> int:
    written = sum(tensor.nbytes for tensor in results)
    if func in _READ_ROWS:
        return 2 * written
    if (
        not results and func._schema.is_mutable
    ):  # such as a fused optimizer: all except the gradients are written back
        written = sum(tensor.nbytes for tensor in inputs) * 3 // 4
    return written + sum(tensor.nbytes for tensor in inputs)


def _product_dtype(func: Any, tensors: list[Tensor]) -> str:
    """Return the type that products are computed in: TF32 for float32 where the program lets cuBLAS or cuDNN use it."""
    floating = (tensor for tensor in tensors if tensor.is_floating_point())
    dtype = next(floating, tensors[0]).dtype
    backends: Any = torch.backends
    library = backends.cuda.matmul
    if "convolution" in func._opname:
        library = backends.cudnn.conv
    elif "cudnn_rnn" in func._opname:
        library = backends.cudnn.rnn
    if dtype == torch.float32 and tensors[0].device.type != "cpu" and library.fp32_precision == "tf32":
        return "tf32"
    return str(dtype).removeprefix("torch.")
