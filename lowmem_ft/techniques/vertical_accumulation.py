"""Vertical accumulation: all micro-batches of a step pass through one decoder layer before any enters the next.

Axes: B rows of all micro-batches, M rows of one, T tokens of a row, H hidden size.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowmem_ft.errors import ModelError, UserError
from lowmem_ft.handle import Handle
from lowmem_ft.techniques.decoder_layers import decoder_layers
from lowmem_ft.techniques.reversible import set_attribute

log = logging.getLogger(__name__)

_POSITION_BIASES = ("alibi", "position_bias")
"""Arguments of layers (Bloom, Falcon, MPT) whose first axis holds heads, alone or with the rows."""


def enable_vertical_accumulation(model: nn.Module, rows_per_micro_batch: int) -> Handle:
    """Makes each decoder layer work on a few rows of its batch after the other; call the model with all rows at once.

    Frees: with it each weight's gradient is finished when its layer's backward ends, so that an optimizer can step
    there, and fp32 sums of gradients live one layer long. The norms beside the layers keep their inputs alone.
    Costs: the inputs of checkpointed layers of all micro-batches live at once, tokens x hidden each; embedding and loss
    see all rows together; the norms beside the layers are computed twice.
    Equals: one micro-batch after the other through the whole model, up to the order of sums (1e-6 in fp32); dropout
    draws its random numbers in another order.
    Limits: with gradients only; evaluation passes as it is. Layers must be checkpointed, or all that they keep for
    backward lives at once. Refused are layers that get what cannot be cut by rows.
    Source: GreedySnake, 2025 (arXiv:2512.17570).

    Args:
        model: a causal LM from transformers, wrapped or not.
        rows_per_micro_batch: rows that pass through a layer together; those left over make a smaller micro-batch.

    Returns:
        A handle whose ``remove()`` brings back each layer's own forward.

    Raises:
        ModelError: if the model has no single stack of decoder layers, or adds a loss of its routers.
        UserError: if its attention kernel gets a mask that cannot be cut.
    """
    layers = decoder_layers(model)
    _refuse_what_needs_the_whole_batch(model)
    norms = _norms_beside(layers, model)
    undo = [
        set_attribute(layer, "forward", _by_rows(layer.forward, rows_per_micro_batch)) for layer in layers
    ]
    for norm in norms:
        recomputed = functools.partial(checkpoint, norm.forward, use_reentrant=False)
        undo.append(set_attribute(norm, "forward", _by_rows(recomputed, rows_per_micro_batch)))
    log.info(
        "accumulation: %d layers take the micro-batches of a step one after the other, %d rows each, before the next "
        "layer does",
        len(layers),
        rows_per_micro_batch,
    )
    return Handle(*undo)


def _refuse_what_needs_the_whole_batch(model: Any) -> None:
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        raise ModelError(
            "accumulation.order=vertical cannot compute the routers' load-balancing loss micro-batch by micro-batch, "
            "and output_router_logits is true in this model's config. Set accumulation.order=horizontal, or "
            "output_router_logits to false in its config.json."
        )
    if model.config._attn_implementation == "flex_attention":
        raise UserError(
            "accumulation.order=vertical cannot cut the block mask of flex attention by rows, got "
            "model.attn_implementation=flex_attention. Set model.attn_implementation=sdpa."
        )


def _norms_beside(layers: nn.ModuleList, model: nn.Module) -> list[nn.Module]:
    """The final norm, and others that see a whole batch: all that a norm keeps in fp32 is several layers' inputs."""
    parent = next(module for module in model.modules() if layers in module.children())
    return [module for module in parent.children() if type(module).__name__.endswith("Norm")]


def _by_rows(forward: Callable[..., Any], rows_per_micro_batch: int) -> Callable[..., Any]:
    @functools.wraps(forward)
    def by_rows(*args: Any, **kwargs: Any) -> Any:
        hidden_BTH = args[0] if args else kwargs["hidden_states"]
        num_rows = len(hidden_BTH)
        if not torch.is_grad_enabled() or num_rows <= rows_per_micro_batch:
            return forward(*args, **kwargs)
        _check_arguments(hidden_BTH, kwargs)
        num_parts = -(-num_rows // rows_per_micro_batch)
        args_by_part = _cut(args, num_rows, rows_per_micro_batch, num_parts)
        kwargs_by_part = _cut(kwargs, num_rows, rows_per_micro_batch, num_parts)
        del args, kwargs, hidden_BTH
        return _joined([forward(*a, **k) for a, k in zip(args_by_part, kwargs_by_part, strict=True)])

    return by_rows


def _check_arguments(hidden_BTH: Tensor, kwargs: dict[str, Any]) -> None:
    biases = [name for name in _POSITION_BIASES if kwargs.get(name) is not None]
    if hidden_BTH.ndim != 3 or biases:
        what = f"the argument {biases[0]}" if biases else f"hidden states of {hidden_BTH.ndim} axes"
        raise ModelError(
            "accumulation.order=vertical needs decoder layers whose arguments can be cut by rows, but these take "
            f"{what}. Set accumulation.order=horizontal."
        )


def _cut(value: Any, num_rows: int, rows: int, num_parts: int) -> list[Any]:
    """The value for each part: tensors with a row for each of the batch's are cut, others (one row, no rows) shared."""
    if isinstance(value, Tensor):
        # split(), whose backward joins the parts' gradients; that of a slice would make one of all rows for each part.
        return list(value.split(rows)) if value.ndim >= 2 and len(value) == num_rows else [value] * num_parts
    if isinstance(value, dict):
        by_key = {key: _cut(item, num_rows, rows, num_parts) for key, item in value.items()}
        return [{key: parts[index] for key, parts in by_key.items()} for index in range(num_parts)]
    if type(value) in (tuple, list):
        by_item = [_cut(item, num_rows, rows, num_parts) for item in value]
        return [type(value)(parts[index] for parts in by_item) for index in range(num_parts)]
    return [value] * num_parts


def _joined(outputs: list[Any]) -> Any:
    """One output of all rows from those of the parts."""
    first = outputs[0]
    if first is None:
        return None
    if isinstance(first, Tensor):
        return torch.cat(outputs)
    if isinstance(first, tuple):
        return tuple(_joined(list(parts)) for parts in zip(*outputs, strict=True))
    raise ModelError(
        "accumulation.order=vertical needs decoder layers that return tensors, but these return "
        f"{type(first).__name__}. Set accumulation.order=horizontal."
    )
