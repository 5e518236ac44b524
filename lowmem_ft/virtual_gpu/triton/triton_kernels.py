"""A launch of a Triton kernel as an operator of the trace: what it reads and writes, and what it computes.

A kernel is taken to read each tensor that it loads from once, and to write each that it stores to once: right for
element-wise kernels and reductions over rows. :data:`_KNOWN` corrects those that do otherwise.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lowmem_ft.foundation.devices import is_virtual
from lowmem_ft.virtual_gpu.recording.kernel_operators import record_kernel
from lowmem_ft.virtual_gpu.triton.triton_operands import operands_of_kernel

Arguments = Mapping[str, Any]
"""A launch's arguments by the names of the kernel's parameters."""


@dataclass(frozen=True)
class _Known:
    """Corrections for a kernel.

    Args:
        reads: for a parameter, how many times its bytes are read, from the launch's arguments.
        covers: for a parameter, the parameter whose bytes are moved in its place: rows of a table.
    """

    reads: Mapping[str, Callable[[Arguments], int]]
    covers: Mapping[str, str]


_KNOWN: dict[str, _Known] = {
    # Liger 0.8.5, ops/cross_entropy.py: softmax's statistics in one pass over a row; its gradient in a second.
    "liger_cross_entropy_kernel": _Known(
        {"X_ptr": lambda given: 1 + bool(given.get("HAS_GRADIENTS", True))}, {}
    ),
    # Liger 0.8.5, ops/experimental/embedding.py: a row of the table for each index.
    "embedding_forward_kernel": _Known({}, {"embeddings_ptr": "output_ptr"}),
    "embedding_backward_kernel": _Known({}, {"grad_weight_ptr": "grad_output_ptr"}),
}


def tensors_of(argument: Any) -> Iterator[Tensor]:
    """Yield the tensors in an argument: itself, those of a tuple, the one that a descriptor or a wrapper describes."""
    if isinstance(argument, Tensor):
        yield argument
    elif isinstance(argument, (tuple, list)):
        for one in argument:
            yield from tensors_of(one)
    elif isinstance(base := getattr(argument, "base", None), Tensor):
        yield base


def check_pointers(tensors: Iterable[Tensor]) -> None:
    """Raise an error for a tensor that is not on the GPU.

    Raises:
        ValueError: for the first such tensor, as Triton raises.
    """
    for position, tensor in enumerate(tensors):
        if not is_virtual(tensor.device):
            raise ValueError(f"Pointer argument (at {position}) cannot be accessed from Triton (cpu tensor?)")


def launch(kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Record a launch, unless the grid is empty.

    Raises:
        ValueError: if a tensor is not on the GPU, as Triton raises.
    """
    for hook in kernel.pre_run_hooks:
        hook(*args, **kwargs)
    given = _arguments_of(kernel.fn, args, kwargs)
    check_pointers(tensors_of(tuple(given.values())))
    sizes = grid(given) if callable(grid) else grid
    if all(sizes if isinstance(sizes, (tuple, list)) else (sizes,)):
        _record_launch(kernel.fn, given)


def _record_launch(function: Callable[..., Any], given: Arguments) -> None:
    pointers = {name: tuple(tensors_of(argument)) for name, argument in given.items()}
    uses = operands_of_kernel(
        function,
        frozenset(name for name, tensors in pointers.items() if tensors),
        _constants(function, given),
    )
    known = _KNOWN.get(function.__name__, _Known({}, {}))
    num_bytes = 0
    written, read = [], []
    for name, tensors in pointers.items():
        if name not in uses.reads | uses.writes:
            continue
        (written if name in uses.writes else read).extend(tensors)
        times = (known.reads[name](given) if name in known.reads else 1) * (name in uses.reads) + (
            name in uses.writes
        )
        num_bytes += times * sum(map(_bytes, pointers[known.covers.get(name, name)]))
    record_kernel(function.__name__, read, written, num_bytes=num_bytes)


def _arguments_of(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a launch's arguments by name, with defaults; options of the compiler, such as ``num_warps``, are left out.

    Raises:
        TypeError: if an argument is missing, or there are too many.
    """
    signature = inspect.signature(function)
    given = signature.bind(
        *args, **{name: value for name, value in kwargs.items() if name in signature.parameters}
    )
    given.apply_defaults()
    return given.arguments


def _constants(function: Callable[..., Any], given: Arguments) -> dict[str, Any]:
    """Return the arguments that are constants of the compiled kernel."""
    parameters = inspect.signature(function).parameters
    return {
        name: getattr(value, "value", value)
        for name, value in given.items()
        if value is None or isinstance(value, bool) or "constexpr" in str(parameters[name].annotation)
    }


def _bytes(tensor: Tensor) -> int:
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())  # an expanded one repeats its own
