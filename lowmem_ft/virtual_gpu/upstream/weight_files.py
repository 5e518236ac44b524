"""Weights on disk while tracing: ``from_pretrained`` reads their shapes, and what a program saves is not written."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowmem_ft.foundation.upstream.patches import existing, loaded_module, replace, wrap

_IN_THIS_THREAD = "HF_DEACTIVATE_ASYNC_LOAD"
"""Environment variable that makes transformers read weights in the calling thread, where the trace sees it."""

_SAVERS = (("transformers.modeling_utils", "PreTrainedModel"), ("peft.peft_model", "PeftModel"))


def shapes_of_checkpoints(undo: contextlib.ExitStack) -> None:
    """Let models be loaded from local checkpoints until a stack is undone."""
    loading = loaded_module("transformers.core_model_loading")
    if loading is not None:
        replace(undo, loading, "_materialize_copy", _materialize_shape)
        undo.callback(_set_environment, os.environ.get(_IN_THIS_THREAD))
        _set_environment("1")


def nothing_saved(undo: contextlib.ExitStack, say: Callable[[str], None]) -> None:
    """Let nothing be saved until a stack is undone.

    Args:
        undo: undoes it.
        say: called when something is not saved.
    """
    not_saved = functools.partial(_not_saved, say)
    for module_name, class_name in _SAVERS:
        module = loaded_module(module_name)
        if module is not None:
            wrap(undo, existing(module, class_name), "save_pretrained", not_saved)
    wrap(undo, torch, "save", not_saved)


def _materialize_shape(tensor: Any, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
    """Replace transformers' function that reads a tensor, or a slice of a file, and moves it."""
    from transformers.modeling_utils import str_to_torch_dtype

    if not isinstance(tensor, Tensor):
        tensor = torch.empty(tensor.get_shape(), dtype=str_to_torch_dtype[tensor.get_dtype()])
    return tensor.to(device=device, dtype=dtype)


def _not_saved(say: Callable[[str], None], *args: Any, **kwargs: Any) -> None:
    say("checkpoints: not written, as a trace has no values")


def _set_environment(value: str | None) -> None:
    if value is None:
        os.environ.pop(_IN_THIS_THREAD, None)
    else:
        os.environ[_IN_THIS_THREAD] = value
