"""Rows of an embedding and a head that are trained while all others are frozen, with PEFT's names in files.

PEFT copies the whole table for each forward, with the trained rows in their places, and gets a gradient of the whole
table. Here the trained rows are a parameter that is a view of the table, so that every reader of the table sees their
values; only the gradient is cut to them.

Axes: N tokens, R trained rows, V rows of the table, H hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lowmem_ft.foundation.errors import raise_problems
from lowmem_ft.foundation.tensors.logical_size import PART_OF_ANOTHER
from lowmem_ft.techniques.adapters.modules_to_save import TRAINABLE, is_tied
from lowmem_ft.techniques.modules.patching import call_around, set_attribute

logger = logging.getLogger(__name__)

_ATTRIBUTE = "lowmem_ft_trained_rows"
_OF_PEFT = "token_adapter", "trainable_tokens_delta"
"""Names that PEFT's files have for the module next to a table and for its parameter."""


@dataclass(frozen=True)
class TrainedRows:
    """The trained rows of a table.

    Args:
        parameter_RH: a view of these rows.
        rows: their numbers in the table.
    """

    parameter_RH: nn.Parameter
    rows: range


def trained_rows_of(layer: nn.Module) -> TrainedRows | None:
    """Return the only rows of an embedding or head that are trained; None: it is frozen or trained whole."""
    return vars(layer).get(_ATTRIBUTE)


def check_rows(model: Any, rows: range, saved_whole: list[nn.Module], *, of_several_parts: bool) -> None:
    """Reject a model in which rows cannot be trained separately, or whose rows vanilla PEFT could not load.

    Args:
        model: a causal LM from transformers.
        rows: the numbers of the rows.
        saved_whole: the modules of ``adapter.modules_to_save``.
        of_several_parts: whether it is the language model of a model with others.

    Raises:
        UserError: if it is one.
    """
    way_out = "Set adapter.train_new_tokens=false and adapter.modules_to_save=[embed_tokens, lm_head]."
    problems = []
    if of_several_parts:
        problems.append(
            "adapter.train_new_tokens=true needs a text-only model, got one with several parts. "
            "Use tokens that its tokenizer has, and set it to false."
        )
    if not rows:
        problems.append(
            "adapter.train_new_tokens=true trains rows of tokens that the tokenizer did not have, got 0. "
            "Name some in model.add_tokens, or set it to false."
        )
    for name, layer in _ends(model).items():
        dtype = layer.weight.dtype
        if layer in saved_whole:
            problems.append(
                f"adapter.train_new_tokens=true trains a part of {name}, which adapter.modules_to_save trains whole. "
                "Leave one of them out."
            )
        elif dtype not in TRAINABLE:
            problems.append(
                "adapter.train_new_tokens=true trains rows in float32 or bfloat16, and those of "
                f"{name} are {str(dtype).removeprefix('torch.')}. Set model.dtype=bfloat16."
            )
        elif not _is_plain(layer):
            problems.append(
                f"adapter.train_new_tokens=true needs a plain embedding and linear head, and {name} is "
                f"{type(layer).__name__}. {way_out}"
            )
        elif getattr(layer, "bias", None) is not None:
            problems.append(
                "adapter.train_new_tokens=true needs a head without a bias, which PEFT would leave out when it loads "
                f"the rows, and {name} has one. {way_out}"
            )
    raise_problems(problems)


def train_rows(model: Any, rows: range) -> Iterator[Callable[[], object]]:
    """Train rows of a model's embedding and head, the same ones for both if they are tied; yield the undo calls.

    The rows keep their trained values when that is undone.

    Args:
        model: a causal LM whose embedding and head are frozen and for which :func:`check_rows` has raised nothing.
        rows: the numbers of the rows.
    """
    ends = _ends(model)
    shared: TrainedRows | None = None
    for layer in ends.values():
        assert rows.stop <= len(layer.weight), "a table has been given a row for each token"
        is_first = shared is None or not is_tied(model)
        if is_first:
            shared = TrainedRows(nn.Parameter(layer.weight.detach()[rows.start : rows.stop]), rows)
            setattr(shared.parameter_RH, PART_OF_ANOTHER, True)
            holder, name = _OF_PEFT
            layer.add_module(holder, nn.ParameterDict({name: shared.parameter_RH}))
            yield partial(delattr, layer, holder)
        yield set_attribute(layer, _ATTRIBUTE, shared)
        around = _embed if isinstance(layer, nn.Embedding) else _project
        yield call_around(layer, "forward", partial(around, layer, shared))
    logger.info(
        "Adapter: rows %d to %d of %s are trained, and no others, %s parameters in their own type%s.",
        *(rows.start, rows.stop - 1, " and ".join(ends)),
        f"{sum(parameter.numel() for parameter in trained_parameters(model)):,}",
        ", the head's with the embedding's" if is_tied(model) else "",
    )


def trained_parameters(model: Any) -> set[nn.Parameter]:
    """Return the parameters that :func:`train_rows` has made."""
    trained = map(trained_rows_of, _ends(model).values())
    return {one.parameter_RH for one in trained if one is not None}


def peft_setting(model: Any) -> dict[str, list[int]]:
    """Return PEFT's ``trainable_token_indices``; for tied layers it names only the embedding."""
    trained = {name: trained_rows_of(layer) for name, layer in _ends(model).items()}
    named = {name: list(one.rows) for name, one in trained.items() if one is not None}
    return dict(list(named.items())[:1]) if is_tied(model) else named


def _ends(model: Any) -> dict[str, Any]:
    """Return the embedding and then the head, by their names."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return {name: module for end in ends for name, module in model.named_modules() if module is end}


def _is_plain(layer: nn.Module) -> bool:
    """Return whether a layer looks rows up, with a factor at most, or is one product; hooks may be around either."""
    kind = type(layer)
    if isinstance(layer, nn.Embedding):
        return kind.forward is nn.Embedding.forward or hasattr(layer, "embed_scale")
    return isinstance(layer, nn.Linear) and kind.forward is nn.Linear.forward


def _embed(
    layer: nn.Module, trained: TrainedRows, stock_forward: Callable[..., Tensor], ids_N: Tensor
) -> Tensor:
    embedded_NH = stock_forward(ids_N)
    if not torch.is_grad_enabled():
        return embedded_NH
    scale = getattr(layer, "embed_scale", None)
    return _EmbeddedRows.apply(embedded_NH, trained.parameter_RH, ids_N, trained.rows, scale)


def _project(
    layer: nn.Module, trained: TrainedRows, stock_forward: Callable[..., Tensor], hidden_NH: Tensor
) -> Tensor:
    logits_NV = stock_forward(hidden_NH)
    if not torch.is_grad_enabled():
        return logits_NV
    return _ProjectedRows.apply(logits_NV, trained.parameter_RH, hidden_NH, trained.rows)


class _EmbeddedRows(torch.autograd.Function):
    """Passes on what a frozen embedding returned; backward gathers the gradient of the trained rows."""

    @staticmethod
    def forward(
        ctx: Any,
        embedded_NH: Tensor,
        parameter_RH: Tensor,
        ids_N: Tensor,
        rows: range,
        scale: Tensor | float | None,
    ) -> Tensor:
        ctx.save_for_backward(ids_N)
        ctx.rows, ctx.scale, ctx.dtype = rows, scale, parameter_RH.dtype
        ctx.mark_dirty(embedded_NH)
        return embedded_NH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_embedded_NH: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (ids_N,) = ctx.saved_tensors
        rows = ctx.rows
        is_trained_N = (ids_N >= rows.start) & (ids_N < rows.stop)
        # All others go to a row after the last, which is the padding's: it gets no gradient.
        row_N = torch.where(is_trained_N, ids_N - rows.start, len(rows))
        d_rows_RH = torch.ops.aten.embedding_dense_backward(
            d_embedded_NH, row_N, len(rows) + 1, len(rows), False
        )[:-1]
        if ctx.scale is not None:
            d_rows_RH = d_rows_RH * ctx.scale
        return None, d_rows_RH.to(ctx.dtype), None, None, None


class _ProjectedRows(torch.autograd.Function):
    """Passes on the logits of a frozen head; backward adds the product that is the gradient of the trained rows."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, parameter_RH: Tensor, hidden_NH: Tensor, rows: range) -> Tensor:
        ctx.save_for_backward(hidden_NH)
        ctx.rows, ctx.dtype = rows, parameter_RH.dtype
        ctx.mark_dirty(logits_NV)
        return logits_NV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logits_NV: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (hidden_NH,) = ctx.saved_tensors
        d_rows_NR = d_logits_NV[..., ctx.rows.start : ctx.rows.stop].flatten(0, -2)
        d_rows_RH = d_rows_NR.T @ hidden_NH.flatten(0, -2).to(d_logits_NV.dtype)
        return d_logits_NV, d_rows_RH.to(ctx.dtype), None, None
