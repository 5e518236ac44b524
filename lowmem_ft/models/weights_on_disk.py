"""Loading a model whose weights go to files, so that it may be larger than RAM."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from accelerate.utils import patch_environment
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from lowmem_ft.foundation.host.mapped_files import is_in_file
from lowmem_ft.foundation.host.pinned_memory import HostMemory
from lowmem_ft.foundation.system.malloc import return_free_memory


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
    with each_weight_moved_by(partial(_move, host)):
        yield


@contextlib.contextmanager
def each_weight_moved_by(move: Callable[[nn.Module, str, nn.Parameter], None]) -> Iterator[None]:
    """Call ``move`` with every weight that a module gets in a ``with`` block.

    Transformers reads each weight on demand meanwhile, not all of them beforehand.
    """
    with patch_environment(HF_DEACTIVATE_ASYNC_LOAD="1"):
        hook = register_module_parameter_registration_hook(move)
        try:
            yield
        finally:
            hook.remove()


@torch.no_grad()
def _move(host: HostMemory, module: nn.Module, name: str, weight: nn.Parameter) -> None:
    if weight.is_meta or is_in_file(weight):  # not yet loaded, or moved under another name that it is tied to
        return
    is_int8 = getattr(weight, "CB", None) is not None  # bitsandbytes', which holds its values by two names
    weight.data = host.allocate(weight.shape, weight.dtype, "parameter").copy_(weight.data)
    if is_int8:
        weight.CB = weight.data  # type: ignore[attr-defined]
    return_free_memory()  # after each: glibc would keep most of a model
