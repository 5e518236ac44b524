"""Checkpointing that keeps attention's outputs, so that attention is not computed a second time."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lowmem_ft.foundation.errors import UserError

log = logging.getLogger(__name__)

_UNFUSED = ("eager", "flex_attention")


_PAST_HOOKS: dict[str, Any] = (
    {"respect_saved_tensors_hooks": False}
    if "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters
    else {}
)
"""Kept attention goes past hooks on saved tensors, as in torch 2.13: 2.14 asks, since its default will change."""


class KeepAttentionOutputs:
    """A checkpointing function for layers that recomputes everything except attention.

    It keeps the results of fused attention operators of any backend: ``scaled_dot_product_attention``'s on CPU and
    CUDA, flash-attn's own, those of the kernels hub. Their backward needs no more than their inputs, which are
    recomputed, and their output with one number per row and head.

    An operator that draws dropout is computed again all the same: if it were skipped, dropout after it would draw
    other numbers than before.
    """

    def __init__(self) -> None:
        self._num_kept = 0
        self._has_warned = False

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return the function's result; backward recomputes all of it except attention."""
        num_kept = self._num_kept
        result = checkpoint(function, *args, use_reentrant=False, context_fn=self._contexts, **_PAST_HOOKS)
        if self._num_kept == num_kept and torch.is_grad_enabled() and not self._has_warned:
            self._has_warned = True
            log.warning(
                "checkpointing.mode=selective keeps nothing of some layers and recomputes them completely, because "
                "they ran no fused attention kernel without dropout. checkpointing.mode=full does the same with less "
                "overhead."
            )
        return result

    def _contexts(self) -> Any:
        return create_selective_checkpoint_contexts(self._policy)

    def _policy(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if not _is_attention(operator) or _dropout_of(operator, args, kwargs):
            return CheckpointPolicy.PREFER_RECOMPUTE
        self._num_kept += 1
        return CheckpointPolicy.MUST_SAVE


def refuse_unfused_attention(implementation: str | None) -> None:
    """Reject attention whose scores backward needs: keeping the output alone would save nothing.

    Args:
        implementation: that of the model's config; None if it has none.

    Raises:
        UserError: if it is not one fused operator.
    """
    if implementation in _UNFUSED:
        raise UserError(
            "checkpointing.mode=selective needs attention that is one fused operator (sdpa or flash_attention_2), got "
            f"{implementation}. Set checkpointing.mode=full, or model.attn_implementation=sdpa where the architecture "
            "has it."
        )


def _is_attention(operator: Any) -> bool:
    """Return whether an operator is attention, judged by its name, since every kernel brings its own operators."""
    name = operator.name().lower()
    return ("_attention" in name or "attn" in name) and "backward" not in name and "bwd" not in name


def _dropout_of(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    for position, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p":
            return args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
    return 0.0
