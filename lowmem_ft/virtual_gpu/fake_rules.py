"""Fake rules for operators of torch that come without one."""

from __future__ import annotations

from typing import Any

import torch

_IN_PLACE = ("_fused_sgd_", "_fused_sgd_.tensor_lr", "_fused_adagrad_", "_fused_adagrad_.tensor_lr")
"""Optimizer steps in one kernel: they write into their arguments and return nothing."""

_library = torch.library.Library("aten", "IMPL")


def register_fake_rules() -> None:
    """Teach torch's meta device what it does not know, once in a process."""
    for name in _IN_PLACE:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
            _library.impl(name, _nothing, "Meta")


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass
