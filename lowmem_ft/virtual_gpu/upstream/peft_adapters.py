"""PEFT's adapters on the virtual GPU, where their forward asks for values that a trace does not have.

LoHa and LoKr draw a number to leave a layer's adapter out (``module_dropout``): it stays in, as mostly. SHiRA's weights
are sparse tensors, of which a trace does not know how much memory they take.
Source: PEFT 0.21.2, ``tuners/loha/layer.py``, ``tuners/lokr/layer.py``, ``tuners/shira/layer.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.upstream.import_hooks import wrap_when_imported


def pefts_adapters_without_values(undo: contextlib.ExitStack) -> None:
    """Let PEFT's layers compute with unknown values until a stack is undone, whether imported before or later."""
    wrap_when_imported(undo, "peft.tuners.loha.layer", "LoHaLayer", "forward", _with_adapter)
    wrap_when_imported(undo, "peft.tuners.lokr.layer", "LoKrLayer", "forward", _with_adapter)
    wrap_when_imported(undo, "peft.tuners.shira.layer", "ShiraLayer", "update_layer", _refuse_sparse)


def _with_adapter(forward: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute as if there were no draw, which a layer makes in training alone, as it does its dropout of ranks."""
    if any(layer.rank_dropout.values()):
        return forward(layer, *args, **kwargs)
    training, layer.training = layer.training, False
    try:
        return forward(layer, *args, **kwargs)
    finally:
        layer.training = training


def _refuse_sparse(update: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    raise UserError(
        "An estimate has no bytes of sparse tensors, which SHiRA's weights are. Estimate another adapter of the same "
        "number of weights, such as LoRA."
    )
