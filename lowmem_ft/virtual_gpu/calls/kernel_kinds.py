"""Kinds of kernels that reach different shares of a GPU's rates, by the operator that runs them."""

from __future__ import annotations

from typing import Literal, get_args

KernelKind = Literal[
    "products",
    "attention",
    "attention backward",
    "dense convolutions",
    "grouped convolutions",
    "depthwise convolutions",
    "fused kernels",
    "fused backward kernels",
    "cross entropy",
    "updates",
    "unpacking",
    "lookups",
    "reductions",
    "element-wise",
]

KERNEL_KINDS: tuple[KernelKind, ...] = get_args(KernelKind)

_UPDATES = (
    "_fused_adam",
    "_fused_sgd",
    "_fused_adagrad",
    "optimizer_update",
    "optimizer_step",
    "update_in_triton",
)
_LOOKUPS = ("embedding", "index", "gather", "scatter")
_REDUCTIONS = (
    *("softmax", "layer_norm", "rms_norm", "group_norm", "batch_norm", "nll_loss", "logsumexp"),
    *("sum", "mean", "amax", "linalg_vector_norm", "_foreach_norm", "var"),
)


def kind_of(name: str, shape: tuple[int, ...], *, has_products: bool, by_triton: bool) -> KernelKind:
    """Return the kind of a kernel.

    Args:
        name: name of its operator, or of a Triton kernel.
        shape: its sizes (``costs/shapes.py``).
        has_products: whether it multiplies matrices.
        by_triton: whether Triton launches it.
    """
    is_backward = "backward" in name or "bwd" in name
    if "attention" in name or "attn" in name:
        return "attention backward" if is_backward else "attention"
    if "convolution" in name and has_products:
        groups, channels, _ = shape or (1, 0, 0)
        if groups == 1:
            return "dense convolutions"
        return "depthwise convolutions" if channels == 1 else "grouped convolutions"
    if has_products:
        return "products"
    if name.startswith(_UPDATES):
        return "updates"
    if "dequantize" in name:
        return "unpacking"
    if "cross_entropy" in name:
        return "cross entropy"
    if by_triton:
        return "fused backward kernels" if is_backward else "fused kernels"
    if name.startswith(_LOOKUPS):
        return "lookups"
    return "reductions" if any(part in name for part in _REDUCTIONS) else "element-wise"
