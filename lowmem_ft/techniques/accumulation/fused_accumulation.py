"""Sums of gradients inside the products that compute them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lowmem_ft.foundation.devices import has_values, name_of
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.techniques.gradients.gradient_sums_in_products import SummingLinear, add_product_
from lowmem_ft.techniques.loss.chunked_loss import ChunkedLoss
from lowmem_ft.techniques.modules.model_parts import ModelParts
from lowmem_ft.techniques.modules.patching import set_attribute
from lowmem_ft.techniques.modules.save_before_compute import last_of_each_decoder_layer
from lowmem_ft.techniques.technique import Technique

__all__ = ["enable_fused_accumulation"]

log = logging.getLogger(__name__)


class FusedAccumulation(Technique):
    """Sums inside products that are enabled; see :func:`enable_fused_accumulation`."""


def enable_fused_accumulation(
    model: nn.Module | ModelParts, *, device: torch.device, loss: ChunkedLoss | None = None
) -> FusedAccumulation:
    """Make the product that computes a 16-bit weight's gradient add it to the sum of the micro-batches.

    Frees: the 16-bit gradient of one linear layer at a time, 2 bytes a weight, and its float32 copy, 4 more, if sums
    are in float32; the same for a chunked loss's head, and with float32 sums a micro-batch's gradients of the logits.
    Saves time on the GPU: a product, a cast and a sum become one kernel. Costs: the host's time, for an autograd
    function in Python a layer. Where the host sets the pace, steps take longer: on an H200, 1b-bf16 with one row per
    micro-batch took 1.28 s instead of 1.24. Equals: autograd's sums, or those of :func:`enable_float32_accumulation`
    where it is enabled before, except that a micro-batch's share is not rounded to 16 bits before it is added. A sum in
    16 bits is rounded once a micro-batch. Limits: the weights of ``nn.Linear`` layers. Norms, biases, embeddings,
    experts in one tensor and layers whose forward something else has replaced (a streamed head) are summed as before.
    The loss must reach backward unscaled where its head is summed. Hooks on a weight's gradient (``register_hook``)
    would get none and are refused; those after accumulation run as before. Not with ``DistributedDataParallel`` or
    ``fully_shard``, which take gradients from autograd. Source: ``gradient_accumulation_fusion`` of Megatron-LM;
    ``torch.addmm(out_dtype=...)`` of torch 2.13.

    Args:
        model: a causal LM whose weights are trained, or its parts.
        device: the device that computes the gradients.
        loss: its chunked loss, if it has one.

    Returns:
        A handle whose ``remove()`` gives the layers their own forward back.

    Raises:
        UserError: if the device lacks such a product, no weight is trained in 16 bits, or a weight has a hook that
            would get no gradient.
    """
    parts = ModelParts.of(model)
    linears = list(_layers_of(parts.model))
    if not linears:
        raise UserError(
            "accumulation.fusion sums the gradients of trained 16-bit weights of nn.Linear layers, and "
            f"{type(parts.model).__name__} has none, or only one whose forward something else computes, such as a "
            "streamed head. Set accumulation.fusion=false."
        )
    for name, parameter in parts.model.named_parameters():
        if parameter._backward_hooks:
            raise UserError(
                f"accumulation.fusion passes no gradient to the hook on {name} (register_hook). Use "
                "register_post_accumulate_grad_hook, or set accumulation.fusion=false."
            )
    _try_product(device, linears[0].weight)
    fused = FusedAccumulation()
    last = last_of_each_decoder_layer(parts.model, linears)
    for linear in linears:
        fused.undo_first(set_attribute(linear, "forward", SummingLinear(linear, is_last=linear in last)))
    if loss is not None:
        fused.undo_first(loss.sum_head_in_product())
    log.info("Accumulation: the products of %d linear layers add to their sums.", len(linears))
    return fused


def _layers_of(model: nn.Module) -> Iterator[nn.Linear]:
    """Yield the plain linear layers with trained 16-bit weights, whose forward is their own."""
    for module in model.modules():
        if type(module) is not nn.Linear or "forward" in vars(module):
            continue
        if module.weight.requires_grad and module.weight.dtype.itemsize < 4:
            yield module


def _try_product(device: torch.device, weight: Tensor) -> None:
    """Refuse a device that cannot add a product to a sum of the type of this weight's ``.grad``, or adds it wrongly."""
    factor = torch.ones(16, 16, dtype=weight.dtype, device=device)
    total = torch.ones(16, 16, dtype=weight.grad_dtype, device=device)
    try:
        add_product_(total, factor, factor)
        problem = "gets another sum" if has_values(total) and not bool((total == 17).all()) else None
    except (RuntimeError, TypeError) as error:  # the second of fake tensors before torch 2.13
        problem = str(error)
    if problem is not None:
        raise UserError(
            f"accumulation.fusion needs a device that adds a {_name_of(factor.dtype)} product to a "
            f"{_name_of(total.dtype)} sum, but {name_of(device)} does not: {problem}. Set accumulation.fusion=false."
        )


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
