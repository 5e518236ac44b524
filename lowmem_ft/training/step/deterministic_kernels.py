"""Deterministic kernels, which give the same bits each time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
from accelerate.utils import patch_environment

from lowmem_ft.foundation.errors import UserError

_OF_CUBLAS, _OF_FLASH_ATTN = "CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"
_REPEATABLE = ":4096:8"


@contextlib.contextmanager
def deterministic_kernels(enabled: bool = True) -> Iterator[None]:
    """Restrict the process to deterministic kernels while a block runs, as ``training.full_determinism`` asks for.

    A torch operator without such a kernel raises an error. cuBLAS is configured by a variable that torch reads once, at
    the process's first product on CUDA, so enter the block before that; flash-attn by one that transformers reads in
    every forward pass. bitsandbytes has no such switch, and none of its kernels that recipes use adds numbers in an
    order that varies.

    Equals: on CUDA the same bits again on the same model of GPU, with the same versions of driver and libraries, batch
    shapes and number of processes. Without it the backward of sdpa's and flash-attn's attention and some scattered sums
    (of experts, for instance) add in an order that varies from run to run. On a CPU it changes nothing.

    Args:
        enabled: False does nothing.

    Yields:
        Nothing; all settings are restored afterwards.

    Raises:
        UserError: if the process has multiplied on CUDA before, with another cuBLAS setting.
    """
    if not enabled:
        yield
        return
    before = os.environ.get(_OF_CUBLAS)
    settings = {_OF_CUBLAS: before or _REPEATABLE, _OF_FLASH_ATTN: "1"}
    was_on = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with patch_environment(**settings):
            yield
    except RuntimeError as error:
        if _OF_CUBLAS not in str(error):
            raise
        raise UserError(
            "training.full_determinism=true must configure cuBLAS before the process's first matrix product on CUDA, "
            f"which was computed with {_OF_CUBLAS}={before or 'unset'}. Train in a separate process, or "
            f"start this one with {_OF_CUBLAS}={_REPEATABLE}."
        ) from error
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=only_warned)
