"""``torch.inference_mode`` on a tracing machine: it works as ``no_grad``, which takes the same memory.

In inference mode, composite operators reach a trace whole, and torch has no kernels for them on the virtual device.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.autograd.grad_mode import inference_mode

from lowmem_ft.foundation.upstream.patches import replace


def inference_mode_as_no_grad(undo: contextlib.ExitStack) -> None:
    """Let ``inference_mode`` only switch off gradients until a stack is undone; its tensors are ordinary ones."""
    running: list[tuple[bool, contextlib.AbstractContextManager[Any]]] = []

    def enter(self: inference_mode) -> None:
        no_grad = torch.autograd.set_grad_enabled(not self.mode)
        running.append((self.mode, no_grad))

    def leave(self: inference_mode, *exception: Any) -> None:
        running.pop()[1].__exit__(*exception)

    replace(undo, inference_mode, "__enter__", enter)
    replace(undo, inference_mode, "__exit__", leave)
    replace(undo, torch, "is_inference_mode_enabled", lambda: bool(running) and running[-1][0])
