"""The forward pass of transformers' fused experts by grouped products, of which others can change one.

transformers keeps the experts of a layer in tensors of three axes, and multiplies them by functions that take all of a
weight. Here each product is a method: packed weights are unpacked in it (``models/quantizing``), and an adapter is
added to it (``techniques/adapters``). Rows are sorted by expert, and the host never waits to learn how many each has.

Axes: T tokens, K experts that a token passes, S = T * K rows, E experts, I inputs, O outputs of a product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.integrations import moe


def weights_of(module: nn.Module) -> tuple[str, ...]:
    """Return the names of a module's tensors of experts; none unless transformers multiplies them by its interface."""
    if not hasattr(module, "has_gate") or not hasattr(module, "is_transposed"):
        return ()
    return ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")


class GroupedExperts:
    """The forward pass of an experts module, in the place of its own.

    Args:
        module: an experts module of transformers, for which :func:`weights_of` returns names.
    """

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, hidden_TI: Tensor, experts_TK: Tensor, shares_TK: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, shape (T, I); see transformers' ``integrations/moe.py``."""
        module, (to_inner, to_outer) = self.module, weights_of(self.module)
        experts_S, order_S = experts_TK.flatten().sort(stable=True)
        everyone_E = torch.arange(module.num_experts, device=experts_S.device)
        ends_E = torch.searchsorted(experts_S, everyone_E, right=True, out_int32=True)
        rows = hidden_TI[order_S // experts_TK.shape[1]]
        rows = self._with_bias(self.product(rows, to_inner, ends_E), to_inner, experts_S)
        rows = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
        rows = self._with_bias(self.product(rows, to_outer, ends_E), to_outer, experts_S)
        if getattr(module, "has_post_expert_norm", False):  # since transformers 5.20
            rows = module.post_expert_norm(rows)
        rows = rows * shares_TK.flatten()[order_S].unsqueeze(-1)
        of_tokens = rows[order_S.argsort()].view(*experts_TK.shape, -1)
        return of_tokens.sum(1).to(hidden_TI.dtype)

    def product(self, rows: Tensor, name: str, ends_E: Tensor) -> Tensor:
        """Multiply each expert's rows by its weight; a frozen weight saves nothing for backward.

        Args:
            rows: shape (S, I), sorted by expert.
            name: the weight's.
            ends_E: where each expert's rows end.

        Returns:
            Shape (S, O), in the type of ``rows`` if the weight is frozen; it may be changed in place.
        """
        weight = self.module._parameters.get(name)  # packed ones may have other names
        if weight is not None and weight.requires_grad:
            return moe._grouped_mm(
                rows, weight if self.module.is_transposed else weight.transpose(1, 2), ends_E
            )
        return _Product.apply(rows, ends_E, self, name)

    def compute_dtype(self, name: str, rows: Tensor) -> torch.dtype:
        """Return the type that a weight's products with these rows are computed in."""
        return getattr(self.module, name).dtype

    def multiply(
        self, rows: Tensor, ends_E: Tensor, name: str, dtype: torch.dtype, *, swapped: bool
    ) -> Tensor:
        """Multiply each expert's rows by its weight, or by the weight with its axes swapped, in a type.

        Returns:
            Shape (S, O), or (S, I) of swapped axes.
        """
        weight = getattr(self.module, name)
        return moe._grouped_mm(rows.to(dtype), weight.transpose(1, 2) if swapped else weight, ends_E)

    def _with_bias(self, product: Tensor, name: str, experts_S: Tensor) -> Tensor:
        bias = getattr(self.module, f"{name}_bias", None) if self.module.has_bias else None
        return product if bias is None else product + bias[experts_S]


class _Product(torch.autograd.Function):
    """Grouped product with frozen weights: saves no weight for backward, which reads it again."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ends_E: Tensor, experts: GroupedExperts, name: str) -> Tensor:
        ctx.save_for_backward(ends_E)
        ctx.experts, ctx.of_weight, ctx.dtype = experts, name, rows.dtype
        ctx.of_products = experts.compute_dtype(name, rows)
        swapped = not experts.module.is_transposed
        return experts.multiply(rows, ends_E, name, ctx.of_products, swapped=swapped).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_product: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (ends_E,) = ctx.saved_tensors
        swapped = ctx.experts.module.is_transposed
        d_rows = ctx.experts.multiply(d_product, ends_E, ctx.of_weight, ctx.of_products, swapped=swapped)
        return d_rows.to(ctx.dtype), None, None, None
