"""Liger's functions as autograd sees them: by one kernel each, and safe where a graph is differentiated twice."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor


def rotary_in_triton(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Turn queries and keys by Liger's Triton kernel, whatever other languages its dispatcher finds kernels in."""
    from liger_kernel.ops import LigerRopeFunction

    return LigerRopeFunction.apply(query, key, cos, sin, None, unsqueeze_dim)


@functools.cache
def gates_of_one_backward() -> dict[str, Any]:
    """Return Liger's gated activations by the names under which its MLPs find them; they refuse a second backward.

    Liger writes the gradients over what it has saved, and autograd does not see it: a second backward pass over the
    same graph would take gradients for inputs.
    """
    from liger_kernel.ops import LigerGELUMulFunction, LigerSiLUMulFunction

    return {
        "_swiglu_dispatch": _of_one_backward(LigerSiLUMulFunction).apply,
        "LigerGELUMulFunction": _of_one_backward(LigerGELUMulFunction),
    }


def _of_one_backward(function: Any) -> Any:
    def backward(ctx: Any, d_output: Tensor) -> Any:
        if getattr(ctx, "is_spent", False):
            raise RuntimeError(
                "Liger's gated activation wrote its gradients over its inputs in the first backward pass; run the "
                "forward pass again, or set model.kernels=none."
            )
        ctx.is_spent = True
        return function.backward(ctx, d_output)

    return type(function.__name__, (function,), {"backward": staticmethod(backward)})
