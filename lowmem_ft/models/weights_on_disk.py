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
"""Environment variable that makes transformers read each weight on demand, not all of them beforehand."""


@contextlib.contextmanager
def weights_in_files(host: HostMemory) -> Iterator[None]:
    """Move every weight that a module gets in a ``with`` block to a file at once, if ``host`` keeps weights in files.

    RAM holds one weight at a time and its sources: a tensor of another type, or the experts of a layer that become one
    tensor; and the scales of quantised weights. Only for a GGUF file, transformers unpacks all weights to RAM before
    any module gets one.

    Args:
        host: the host memory that keeps the weights.
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
    """Make transformers read each weight on demand in a ``with`` block, not all of them beforehand."""
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
    if weight.is_meta or is_in_file(weight):  # not yet loaded, or moved under another name that it is tied to
        return
    is_int8 = getattr(weight, "CB", None) is not None  # bitsandbytes', which holds its values by two names
    weight.data = host.allocate(weight.shape, weight.dtype, "parameter").copy_(weight.data)
    if is_int8:
        weight.CB = weight.data  # type: ignore[attr-defined]
    return_free_memory()
