"""Where a test that takes a device runs: on a CPU, on CUDA if there is one, and on the virtual GPU, without values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

from lowmem_ft.virtual_gpu import VirtualGPU

VIRTUAL = "virtual"


def on_cuda(names: Iterable[str]) -> list[Any]:
    """Parameters of a test with each name on CUDA; marked."""
    return [pytest.param(name, "cuda", id=f"{name}-cuda", marks=pytest.mark.gpu) for name in names]


def on_virtual_gpu(names: Iterable[str]) -> list[Any]:
    """The same on the virtual GPU, which takes what CUDA takes and refuses what it refuses."""
    return [pytest.param(name, VIRTUAL, id=f"{name}-{VIRTUAL}") for name in names]


@contextlib.contextmanager
def running_on(device: str) -> Iterator[tuple[str, bool]]:
    """What a program calls a device in a block, and whether its tensors have values there."""
    if device == VIRTUAL:
        with VirtualGPU("a100-80gb", check_streams=True):
            yield "cuda", False
        return
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    yield device, True
