"""Launches of the kernels of packages that need not be installed here."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lowmem_ft.foundation.catalog.gpu_catalog import load_gpus
from lowmem_ft.foundation.devices import is_virtual
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.virtual_gpu.calls.active import active_gpu
from lowmem_ft.virtual_gpu.recording.kernel_operators import record_kernel
from lowmem_ft.virtual_gpu.triton.triton_driver import benchmark
from lowmem_ft.virtual_gpu.triton.triton_kernels import check_pointers
from lowmem_ft.virtual_gpu.values.constant_propagation import known_values

_TUNED: weakref.WeakKeyDictionary[object, set[object]] = weakref.WeakKeyDictionary()
"""Kernels whose fastest configuration a virtual GPU has already looked for."""


def triton_kernel(
    name: str,
    reads: Sequence[Tensor | None],
    writes: Sequence[Tensor | None],
    *,
    updates: Sequence[Tensor] = (),
    flops: int = 0,
    is_tuned: bool = True,
    tuned_for: object = "",
) -> None:
    """Record the launch of a Triton kernel; before the first of a tuned one, take the buffer that its timings take.

    Args:
        name: name of the kernel.
        reads: tensors that it reads once; the first is an operand of its products.
        writes: tensors that it writes once.
        updates: tensors that it reads and writes.
        flops: floating-point operations of its products.
        is_tuned: whether Triton looks for its fastest configuration.
        tuned_for: what it is tuned for again.

    Raises:
        ValueError: if a tensor is not on the GPU, as Triton raises.
    """
    check_pointers(_given((*reads, *writes, *updates)))
    tuned = _TUNED.setdefault(active_gpu(), set())
    if is_tuned and (name, tuned_for) not in tuned:
        tuned.add((name, tuned_for))
        benchmark()
    _record(name, reads, writes, updates, flops, by_triton=True)


def compiled_kernel(
    name: str,
    reads: Sequence[Tensor | None],
    writes: Sequence[Tensor | None],
    *,
    updates: Sequence[Tensor] = (),
    flops: int = 0,
) -> None:
    """Record the launch of a kernel in a compiled extension; arguments are those of :func:`triton_kernel`.

    Raises:
        RuntimeError: if a tensor is not on the GPU, as these extensions raise.
    """
    if not all(is_virtual(tensor.device) for tensor in _given((*reads, *writes, *updates))):
        raise RuntimeError(
            f"Expected x.is_cuda() to be true, but got false: {name} has no kernel for the CPU."
        )
    _record(name, reads, writes, updates, flops, by_triton=False)


def chunks_of_documents(cu_seqlens: Tensor, num_tokens: int, chunk_size: int) -> int:
    """Return the number of chunks that documents end to end are cut into; the most there can be if it is not known.

    The host reads the documents' lengths for it.
    """
    active_gpu().recorder.host_reads(cu_seqlens)
    known = known_values(cu_seqlens)
    if known is None:
        return num_tokens // chunk_size + cu_seqlens.numel() - 1
    ends = known.tolist()
    return sum(-(-(end - start) // chunk_size) for start, end in itertools.pairwise(ends))


def multiprocessors() -> int:
    """Return the most multiprocessors that a GPU of the active one's architecture has: one trace serves all of them."""
    spec = active_gpu().spec
    alike = (gpu for gpu in load_gpus().values() if gpu.compute_capability == spec.compute_capability)
    return max(spec.num_multiprocessors, *(gpu.num_multiprocessors for gpu in alike), 0)


def check_plain(name: str, weight: Tensor) -> None:
    """Refuse a layer's weight that a function of mamba-ssm multiplies by itself and cannot.

    Args:
        name: name of the layer.
        weight: its weight.

    Raises:
        UserError: if it is packed.
    """
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        got = f"one that is packed ({str(weight.dtype).removeprefix('torch.')})"
        raise refusal(
            "mamba-ssm", f"the weight of {name} as a plain tensor, which it multiplies by itself", got
        )


def refusal(package: str, needs: str, got: str) -> UserError:
    """Return the error for what a package refuses where it is installed.

    Args:
        package: the package.
        needs: what it needs.
        got: what it was given.
    """
    return UserError(
        f"{package} needs {needs}, got {got}. Uninstall it where the run is, and estimate with --without-packages."
    )


def contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    """Return contiguous tensors, copied where they are not."""
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def _record(
    name: str,
    reads: Sequence[Tensor | None],
    writes: Sequence[Tensor | None],
    updates: Sequence[Tensor],
    flops: int,
    *,
    by_triton: bool,
) -> None:
    read, written = list(_given(reads)), list(_given(writes))
    num_bytes = sum(tensor.nbytes for tensor in (*read, *written, *updates, *updates))
    record_kernel(name, read, [*written, *updates], num_bytes=num_bytes, flops=flops, by_triton=by_triton)


def _given(tensors: Iterable[Tensor | None]) -> Iterable[Tensor]:
    return (tensor for tensor in tensors if tensor is not None)


def tile_size(size: int, most: int) -> int:
    """Return the power of two, from 16 to ``most``, in which a kernel takes a dimension."""
    return min(max(1 << (size - 1).bit_length(), 16), most)


def float32_like(tensor: Tensor) -> Tensor:
    """Return new memory of a tensor's shape in float32."""
    return torch.empty_like(tensor, dtype=torch.float32)
