"""LoRA next to fused experts by grouped products, where PEFT computes the whole sum of weight and adapter.

Axes: S rows sorted by expert, E experts, I inputs of a product, O outputs, R rank of each expert's adapter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from transformers.integrations import moe

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.tensors.logical_size import is_packed
from lowmem_ft.foundation.upstream.grouped_experts import GroupedExperts, weights_of
from lowmem_ft.techniques.adapters.peft_layers import active_adapter
from lowmem_ft.techniques.modules.patching import call_around, set_attribute

logger = logging.getLogger(__name__)

_RANK_MULTIPLE = 8
"""Ranks are filled up with zeros to a multiple: CUDA's grouped products take rows of 16 bytes or a multiple of them."""


def adapts_experts(layer: Any) -> bool:
    """Return whether a layer of PEFT adapts experts whose products can be grouped."""
    return getattr(layer, "parameter_name", None) in weights_of(layer.get_base_layer())


def add_in_products(layers: Iterable[Any], said: set[str]) -> Iterator[Callable[[], object]]:
    """Add each adapter to its experts' products; yield the undo calls.

    Args:
        layers: those of PEFT for which :func:`adapts_experts` is true.
        said: reasons for PEFT's own forward that have been logged.
    """
    for layer in layers:
        experts = layer.get_base_layer()
        if not isinstance(experts.forward, GroupedExperts):
            yield set_attribute(experts, "forward", GroupedExperts(experts))
        yield call_around(experts.forward, "product", partial(_product, layer, experts.forward))
        yield call_around(layer, "forward", partial(_forward, layer, said))


def _forward(
    layer: Any, said: set[str], stock_forward: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> Tensor:
    _, otherwise = active_adapter(layer)
    if not otherwise:
        return layer.base_layer(*args, **kwargs)
    if is_packed(layer.get_param()) and not layer.disable_adapters:
        raise UserError(
            f"Packed experts take one adapter, which is added to their products; {layer.parameter_name} has {otherwise}"
            ". Load the model with model.quantization=none."
        )
    if otherwise not in said:
        said.add(otherwise)
        logger.info("Fused adapters: PEFT's own forward computes experts with %s.", otherwise)
    return stock_forward(*args, **kwargs)


def _product(
    layer: Any,
    experts: GroupedExperts,
    stock_product: Callable[..., Tensor],
    rows: Tensor,
    name: str,
    ends_E: Tensor,
) -> Tensor:
    product = stock_product(rows, name, ends_E)
    adapter, otherwise = active_adapter(layer)
    if name != layer.parameter_name or otherwise:
        return product
    added = _low_rank(
        rows.to(experts.compute_dtype(name, rows)),
        layer.lora_A[adapter].weight,
        layer.lora_B[adapter].weight * layer.scaling[adapter],
        ends_E,
    )
    return product.add_(added)


def _low_rank(rows: Tensor, weight_A: Tensor, weight_B: Tensor, ends_E: Tensor) -> Tensor:
    """Return each row's product with its expert's two matrices, shape (S, O).

    Args:
        rows: shape (S, I), in the type of the products.
        weight_A: shape (E * R, I), one expert's ranks after the other's.
        weight_B: shape (O, R * E), one rank's experts after the other's.
        ends_E: where each expert's rows end.
    """
    num_experts = len(ends_E)
    a_ERI = weight_A.to(rows.dtype).view(num_experts, -1, weight_A.shape[1])
    b_ERO = weight_B.to(rows.dtype).view(len(weight_B), -1, num_experts).permute(2, 1, 0).contiguous()
    if missing := -a_ERI.shape[1] % _RANK_MULTIPLE:
        a_ERI, b_ERO = (F.pad(matrices, (0, 0, 0, missing)) for matrices in (a_ERI, b_ERO))
    inner_SR = moe._grouped_mm(rows, a_ERI.transpose(1, 2), ends_E)
    return moe._grouped_mm(inner_SR, b_ERO, ends_E)
