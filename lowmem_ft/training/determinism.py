"""Kernels that give the same bits each time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from lowmem_ft.foundation.errors import UserError

_OF_CUBLAS, _OF_FLASH_ATTN = "CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"


@contextlib.contextmanager
def deterministic_kernels(enabled: bool = True) -> Iterator[None]:
    """Let the process run deterministic kernels alone while a block runs, as ``training.full_determinism`` asks for.

    Of torch's operators one that has no such kernel is an error. cuBLAS is told by a variable that torch reads once, at
    the process's first product on CUDA, so enter the block before; flash-attn by one that transformers reads in every
    forward. bitsandbytes has no such switch, and none of its kernels that recipes use adds numbers in an order that
    varies.

    Equals: on CUDA the same bits again on the same model of GPU, with the same versions of driver and libraries, batch
    shapes and number of processes. Without it the backward of sdpa's and flash-attn's attention and some scattered sums
    (of experts, for instance) add in an order that varies from run to run. A CPU needs it for nothing.

    Args:
        enabled: False does nothing.

    Yields:
        Nothing; afterwards all is as it was.

    Raises:
        UserError: if the process has multiplied on CUDA before, and cuBLAS was told otherwise then.
    """
    if not enabled:
        yield
        return
    before = {name: os.environ.get(name) for name in (_OF_CUBLAS, _OF_FLASH_ATTN)}
    was_on = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    os.environ.setdefault(_OF_CUBLAS, ":4096:8")
    os.environ[_OF_FLASH_ATTN] = "1"
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        if _OF_CUBLAS not in str(error):
            raise
        raise UserError(
            "training.full_determinism=true has to reach cuBLAS before the process's first product on CUDA, which was "
            f"made with {_OF_CUBLAS}={before[_OF_CUBLAS] or 'unset'}. Train in a process of its own, or start this one "
            f"with {_OF_CUBLAS}=:4096:8."
        ) from error
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=only_warned)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
