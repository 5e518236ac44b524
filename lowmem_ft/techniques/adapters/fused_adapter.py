"""A linear layer and its LoRA adapter as one operation, which saves only its input.

It is one node of autograd, :class:`_Adapted`: each costs the host as much as several operators. Only the last one of a
checkpointed layer saves its input by another node, so that recomputation can stop before it.

Axes: N tokens, I inputs of the layer, O outputs, R rank of the adapter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.tensors.autocast_dtype import autocast_dtype
from lowmem_ft.foundation.tensors.logical_size import is_packed
from lowmem_ft.techniques.adapters.config import AdapterConfig
from lowmem_ft.techniques.adapters.expert_adapter import adapts_experts, add_in_products
from lowmem_ft.techniques.adapters.peft_layers import active_adapter, adapted_layers
from lowmem_ft.techniques.modules.autocast_state import AutocastState
from lowmem_ft.techniques.modules.model_parts import ModelParts
from lowmem_ft.techniques.modules.once_differentiable import once_differentiable
from lowmem_ft.techniques.modules.patching import call_around
from lowmem_ft.techniques.modules.save_before_compute import (
    SavedTensors,
    is_inside_hooks,
    last_of_each_decoder_layer,
    not_as_view,
    save_early,
)
from lowmem_ft.techniques.technique import Technique

__all__ = ["enable_fused_adapters"]

logger = logging.getLogger(__name__)

_ROWS_AT_ONCE = 1024
"""Tokens that are cast together where an adapter computes in another type than its layer."""


def enable_fused_adapters(model: nn.Module | ModelParts, config: AdapterConfig) -> Technique:
    """Compute each linear layer and its LoRA adapter as one operation.

    Frees: what PEFT's forward makes in the layer's output size (the adapter's product, its scaled copy, the sum, for
    4 bits a copy of the output), and what it saves in addition to the input: the input with dropout, the mask, casts.
    Costs: the adapter's first product (rank r) again in backward, and an autograd function in Python a layer.
    Saves time: the adapter's product is added to the layer's output while it is computed; a checkpointed layer that
    ends with an adapted layer does not compute it again, as all that it saves it saves before; and a decoder layer
    takes the host 0.89 of what it takes with PEFT's modules, with weights packed in 4 bits 0.93
    (``scripts/bench layer``, Intel Xeon, torch 2.13, 2026-11-30).
    For fused experts: the adapter is two grouped products more, where PEFT adds it to the whole weight, of all experts,
    in each forward; they need the rows of each product until backward. Packed experts have no other forward.
    Equals: PEFT's LoRA up to rounding: the scaled product is not rounded before it is added, and gradients are not
    between product and scaling. Dropout draws the same numbers.
    Limits: PEFT's forward stays for DoRA, 8-bit layers, layers that are stored the other way round, experts that
    transformers does not multiply by its interface, trained base weights and weights cut by ZeRO-3; and while adapters
    are merged, disabled or several. No second derivative.
    Source: Unsloth, 2024 (github.com/unslothai/unsloth), which fuses whole MLPs, without dropout.

    Args:
        model: a model with PEFT's adapters, wrapped or not, or its parts.
        config: whether to.

    Returns:
        A handle whose ``remove()`` restores PEFT's forward.

    Raises:
        UserError: if PEFT's forward is asked for, and adapted experts are packed.
    """
    parts = ModelParts.of(model)
    layers = list(adapted_layers(parts.model).values())
    of_experts = [layer for layer in layers if adapts_experts(layer)]
    if config.kernel == "peft":
        _refuse_packed(of_experts)
        return Technique()
    fused = [layer for layer in layers if _is_plain(layer)]
    others = len(layers) - len(fused) - len(of_experts)
    logger.info(
        "Fused adapters: %d linear layers and their adapters are one operation each%s%s.",
        len(fused),
        f"; {len(of_experts)} tensors of experts have theirs in grouped products" if of_experts else "",
        f"; {others} of another kind compute as PEFT does" if others else "",
    )
    said: set[str] = set()
    last = last_of_each_decoder_layer(parts.model, fused)
    return Technique(
        *(call_around(layer, "forward", partial(_forward, layer, layer in last, said)) for layer in fused),
        *add_in_products(of_experts, said),
    )


def _refuse_packed(of_experts: Sequence[Any]) -> None:
    for layer in of_experts:
        if is_packed(layer.get_param()):
            raise UserError(
                f"adapter.kernel=peft adds an adapter to a whole weight, and the experts' {layer.parameter_name} is "
                "packed in fewer bits. Set adapter.kernel=fused, which adds it to their products."
            )


def _is_plain(layer: Any) -> bool:
    """Return whether PEFT's forward of a layer is a frozen product plus, by default, a product of two matrices."""
    from peft.tuners import lora

    base = layer.base_layer
    kinds: dict[type, type] = {lora.Linear: nn.Linear}
    if hasattr(lora, "Linear4bit"):
        import bitsandbytes

        kinds[lora.Linear4bit] = bitsandbytes.nn.Linear4bit
    return (
        (type(base) is kinds.get(type(layer)) or (type(layer) is lora.Linear and _is_packed(base)))
        and not layer.fan_in_fan_out
        and not any(parameter.requires_grad for parameter in base.parameters())
        and not layer.lora_variant
        and not any(layer.lora_bias.values())
    )


def _is_packed(base: Any) -> bool:
    """Return whether a layer keeps the weights of its checkpoint in fewer bits."""
    return hasattr(base, "unpacked_weight")


def _forward(
    layer: Any,
    is_last: bool,
    said: set[str],
    stock_forward: Callable[..., Tensor],
    x: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    name, otherwise = active_adapter(layer)
    if args or kwargs:
        otherwise = "arguments in addition to its input"
    if otherwise:
        return _by_peft(otherwise, said, stock_forward, x, *args, **kwargs)
    children = layer._modules  # to ask the module for a child takes it as long as an operator
    base = children["base_layer"]
    weight_RI = children["lora_A"]._modules[name].weight
    weight_OR = children["lora_B"]._modules[name].weight
    has_graph = torch.is_grad_enabled()
    is_trained = not has_graph or (weight_RI.requires_grad and weight_OR.requires_grad)
    if otherwise := _reason_for_peft(layer, base, name, is_trained, x):
        return _by_peft(otherwise, said, stock_forward, x)
    dropout = children["lora_dropout"]._modules[name]
    operation = _operation(base, dropout, layer.scaling[name], weight_RI.dtype, x)
    if not has_graph:
        return operation.forward(x, weight_RI, weight_OR)
    saved, of_input = None, x.requires_grad
    if is_last and is_inside_hooks():
        x, saved = save_early(x, weight_RI, weight_OR)
    return _Adapted.apply(x, weight_RI, weight_OR, operation, saved, of_input)


def _by_peft(
    why: str, said: set[str], stock_forward: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> Tensor:
    if why not in said:
        said.add(why)
        logger.info("Fused adapters: PEFT's own forward computes a layer with %s.", why)
    return stock_forward(*args, **kwargs)


def _reason_for_peft(layer: Any, base: Any, name: str, is_trained: bool, x: Tensor) -> str:
    """Return what about a layer and its input is PEFT's to compute at the moment; empty: nothing."""
    weight = base.weight
    if name in layer.lora_variant or layer.lora_bias[name] or weight.requires_grad:
        return "another kind of adapter, or a weight that is trained itself"
    if not is_trained:
        return "a frozen adapter"
    if type(base) is not nn.Linear and _is_packed_for_cpu(weight):
        return "weights that bitsandbytes has packed for inference on this CPU"
    if not x.is_floating_point() or not x.numel() or (x.dtype is torch.float64 and autocast_dtype(x)):
        return "an empty or float64 input"
    return ""


def _is_packed_for_cpu(weight: Any) -> bool:
    return getattr(getattr(weight, "quant_state", None), "packing_format_for_cpu", False)


def _operation(base: Any, dropout: Any, scaling: float, dtype: torch.dtype, x: Tensor) -> _Operation:
    autocast = autocast_dtype(x)
    # A module that lacks an attribute takes as long to say so as an operator.
    base_dtype = autocast if type(base) is nn.Linear else getattr(base, "compute_dtype", autocast)
    probability = dropout.p if dropout.training and isinstance(dropout, nn.Dropout) else 0.0
    state = AutocastState(x.device) if probability else None
    return _Operation(base, base_dtype or x.dtype, autocast or dtype, scaling, probability, state)


@dataclass(slots=True)
class _Operation:
    """One call of a layer with its adapter.

    Args:
        base: the frozen linear layer.
        base_dtype: the type of its product.
        dtype: the type of the adapter's products.
        scaling: factor on them.
        dropout: probability of a zero in the adapter's input.
        autocast_state: for dropout, those in which forward drew it.
    """

    base: Any
    base_dtype: torch.dtype
    dtype: torch.dtype
    scaling: float
    dropout: float
    autocast_state: AutocastState | None

    def forward(self, x: Tensor, weight_RI: Tensor, weight_OR: Tensor) -> Tensor:
        """Return the layer's output with the adapter's added in place."""
        if type(self.base) is nn.Linear:
            x = _as(x, self.base_dtype)  # autocast would make such a copy for each of the two
        output = self.base(x).contiguous()
        weight_RI, weight_OR = _as(weight_RI, self.dtype), _as(weight_OR, self.dtype)
        for x_tile, output_tile in self._row_tiles(_rows(x), _rows(output)):
            inner_NR = F.linear(self._dropped(_as(x_tile, self.dtype)), weight_RI)
            _add_product_(output_tile, inner_NR, weight_OR.t(), self.scaling)
        return not_as_view(output)

    def gradients(
        self, x: Tensor, weight_RI: Tensor, weight_OR: Tensor, d_output: Tensor, *, of_input: bool
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """Return the gradients of the input, if asked for, and of the adapter's two matrices.

        They are scaled inside the products that end them. Autograd casts those of matrices of another type.
        """
        dtype, scaling = self.dtype, self.scaling
        x_NI, d_output_NO = _rows(x), _rows(d_output)
        d_x_NI = _as(self._through_base(d_output_NO), x.dtype) if of_input else None
        a_RI, b_OR = _as(weight_RI, dtype), _as(weight_OR, dtype)
        d_a_RI = d_b_OR = None
        of_x = (x_NI,) if d_x_NI is None else (x_NI, d_x_NI)
        for d_output_tile, x_tile, *d_x_tile in self._row_tiles(d_output_NO, *of_x):
            d_NO = _as(d_output_tile, dtype)
            d_inner_NR = d_NO @ b_OR
            input_NI = self._dropped_again(_as(x_tile, dtype))
            d_a_RI = _sum(d_a_RI, a_RI, d_inner_NR.t(), input_NI, scaling)
            d_b_OR = _sum(d_b_OR, b_OR, d_NO.t(), F.linear(input_NI, a_RI), scaling)
            del input_NI
            for d_x in d_x_tile:  # one, if any
                if self.dropout:  # a product with the mask is what dropout does to the gradient, too
                    d_x.add_(self._dropped_again(d_inner_NR @ a_RI), alpha=scaling)
                else:
                    _add_product_(d_x, d_inner_NR, a_RI, scaling)
        assert d_a_RI is not None  # there is a token
        assert d_b_OR is not None
        return None if d_x_NI is None else d_x_NI.view_as(x), d_a_RI, d_b_OR

    def _row_tiles(self, *tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
        """Return tiles over tokens, all at once unless casts of them would take memory; dropout draws all at once."""
        if self.dropout or {tensor.dtype for tensor in tensors} == {self.dtype}:
            return (tensors,)
        return zip(*(tensor.split(_ROWS_AT_ONCE) for tensor in tensors), strict=True)

    def _through_base(self, d_output_NO: Tensor) -> Tensor:
        weight: Any = self.base.weight
        if type(self.base) is nn.Linear:
            pass
        elif _is_packed(self.base):
            weight = self.base.unpacked_weight(self.base_dtype)
        else:
            from bitsandbytes.functional import dequantize_4bit

            state = (
                getattr(weight, "quant_state", None) or self.base.quant_state
            )  # FSDP2 makes plain parameters
            weight = dequantize_4bit(weight.view(-1, 1), state)
        return _as(d_output_NO, self.base_dtype) @ _as(weight, self.base_dtype)

    def _dropped(self, values: Tensor) -> Tensor:
        return F.dropout(values, self.dropout) if self.dropout else values

    def _dropped_again(self, values: Tensor) -> Tensor:
        if self.autocast_state is None:
            return values
        with self.autocast_state.again():
            return self._dropped(values)


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in a type; the question alone takes a sixth of the time of an operator that has nothing to do."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.flatten(0, -2)


def _sum(total: Tensor | None, like: Tensor, left: Tensor, right: Tensor, scaling: float) -> Tensor:
    """Return a scaled product, or the total with it."""
    total, share = (torch.empty_like(like), 0) if total is None else (total, 1)
    return total.addmm_(left, right, beta=share, alpha=scaling)


def _add_product_(total: Tensor, left: Tensor, right: Tensor, scaling: float) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right, alpha=scaling)
    else:
        total.add_(left @ right, alpha=scaling)


class _Adapted(torch.autograd.Function):
    """The layer with its adapter."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_RI: Tensor,
        weight_OR: Tensor,
        operation: _Operation,
        saved: SavedTensors | None,
        of_input: bool,
    ) -> Tensor:
        ctx.operation, ctx.saved, ctx.of_input = operation, saved, of_input
        if saved is None:
            ctx.save_for_backward(x, weight_RI, weight_OR)
        return operation.forward(x, weight_RI, weight_OR)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight_RI, weight_OR = (ctx.saved or ctx).saved_tensors
        gradients = ctx.operation.gradients(x, weight_RI, weight_OR, d_output, of_input=ctx.of_input)
        return (*gradients, None, None, None)
