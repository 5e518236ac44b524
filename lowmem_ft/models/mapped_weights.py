"""Loading a model whose weights go to files, so that it may be larger than RAM."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from lowmem_ft.host.mapped_files import is_in_file
from lowmem_ft.host.pinned_memory import HostMemory
from lowmem_ft.system.malloc import return_free_memory

_ONE_AFTER_THE_OTHER = "HF_DEACTIVATE_ASYNC_LOAD"
"""The environment variable by which transformers reads a weight when its turn comes, not all of them beforehand."""


@contextlib.contextmanager
def weights_in_files(host: HostMemory) -> Iterator[None]:
    """Lets every weight that a module gets in a block move to a file at once, if ``host`` keeps weights in files.

    What is in RAM at a time is one weight and what it is made from: a tensor of another type, or the experts of a layer
    that become one tensor; besides, the scales of quantised weights. A GGUF file, though, transformers unpacks to RAM
    before any module gets a weight.

    Args:
        host: where the weights wait.
    """
    if host.files_for("parameter") is None:
        yield
        return
    with one_after_the_other():
        hook = register_module_parameter_registration_hook(partial(_move, host))
        try:
            yield
        finally:
            hook.remove()


@contextlib.contextmanager
def one_after_the_other() -> Iterator[None]:
    """Has transformers read each weight when its turn comes in a block, not all of them beforehand."""
    before = os.environ.get(_ONE_AFTER_THE_OTHER)
    os.environ[_ONE_AFTER_THE_OTHER] = "1"
    try:
        yield
    finally:
        del os.environ[_ONE_AFTER_THE_OTHER]
        if before is not None:
            os.environ[_ONE_AFTER_THE_OTHER] = before


@torch.no_grad()
def _move(host: HostMemory, module: nn.Module, name: str, weight: nn.Parameter) -> None:
    if weight.is_meta or is_in_file(weight):  # yet to come, or here under another name that it is tied to
        return
    is_int8 = getattr(weight, "CB", None) is not None  # of bitsandbytes, which holds its values by two names
    weight.data = host.allocate(weight.shape, weight.dtype, "parameter").copy_(weight.data)
    if is_int8:
        weight.CB = weight.data  # type: ignore[attr-defined]
    return_free_memory()
