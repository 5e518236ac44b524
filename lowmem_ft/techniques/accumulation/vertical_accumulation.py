"""Vertical accumulation: all micro-batches of a step pass through one decoder layer before any enters the next.

Axes: B rows of all micro-batches, M rows of one, T tokens of a row, H hidden size.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.foundation.repetition import rounds
from lowmem_ft.techniques.modules.model_parts import ModelParts
from lowmem_ft.techniques.modules.patching import set_attribute, wrap_method
from lowmem_ft.techniques.technique import Technique

__all__ = ["enable_vertical_accumulation"]

log = logging.getLogger(__name__)

_POSITION_BIASES = ("alibi", "position_bias")
"""Arguments of layers (Bloom, Falcon, MPT) whose first axis holds heads, alone or with the rows."""


class VerticalAccumulation(Technique):
    """All micro-batches in one forward, as one batch; see :func:`enable_vertical_accumulation`.

    Attributes:
        max_tokens: limit on the tokens of the rows that pass through a layer together; None: no limit beyond the
            recipe's rows.
        shape_BT: rows and tokens of the batch that the model is processing.
    """

    takes_whole_window = True

    def __init__(self, rows_per_micro_batch: int) -> None:
        super().__init__()
        self._rows_per_micro_batch = rows_per_micro_batch
        self.max_tokens: int | None = None
        self.shape_BT: tuple[int, ...] = ()

    def take_shape(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        """Remember the shape of the tokens that the embedding is about to look up."""
        if args and isinstance(args[0], Tensor):
            self.shape_BT = tuple(args[0].shape)

    def rows_at_once(self, length: int) -> int:
        """Return how many rows of ``length`` tokens pass through a layer together."""
        if self.max_tokens is None:
            return self._rows_per_micro_batch
        return min(self._rows_per_micro_batch, max(1, self.max_tokens // length))


def enable_vertical_accumulation(
    model: nn.Module | ModelParts, rows_per_micro_batch: int, *, keeps_inputs_alone: bool = False
) -> VerticalAccumulation:
    """Make each decoder layer process a few rows of its batch at a time; call the model with all rows at once.

    Frees: nothing by itself, but each weight's gradient is finished when its layer's backward ends, so that an
    optimizer can step there, and fp32 sums of gradients live for only one layer. The norms outside the layers keep only
    their inputs.
    Costs: the inputs of checkpointed layers of all micro-batches live at once, tokens x hidden each; embedding and loss
    see all rows together; the norms outside the layers are computed twice.
    Equals: one micro-batch after the other through the whole model, up to the order of sums (1e-6 in fp32); dropout
    draws its random numbers in another order.
    Limits: with gradients only; evaluation is unchanged. Layers must be checkpointed, or all that they keep for
    backward lives at once. Layers whose inputs cannot be cut by rows are rejected.
    Source: GreedySnake, 2025 (arXiv:2512.17570).

    Args:
        model: a causal LM from transformers, wrapped or not, or its parts.
        rows_per_micro_batch: rows that pass through a layer together; the rest form a smaller micro-batch.
        keeps_inputs_alone: whether a layer keeps only its input for backward, so that a trace of memory need not go
            through every micro-batch.

    Returns:
        A handle whose ``remove()`` restores each layer's own forward.

    Raises:
        ModelError: if the model has no single stack of decoder layers.
        RowsCannotBeCutError: see :func:`check_vertical_accumulation`.
    """
    parts = ModelParts.of(model)
    check_vertical_accumulation(parts)
    layers = parts.layers()
    norms = _norms_beside(layers, parts.model)
    accumulation = VerticalAccumulation(rows_per_micro_batch)
    accumulation.undo_first(parts.embedding.register_forward_pre_hook(accumulation.take_shape).remove)
    for layer in layers:
        by_rows = functools.partial(_by_rows, accumulation=accumulation, are_alike=keeps_inputs_alone)
        if _checkpoints_all_of(layer):
            accumulation.undo_first(*_checkpoint_inside(layer))
        accumulation.undo_first(wrap_method(layer, "forward", by_rows))
    for norm in norms:
        recomputed = functools.partial(checkpoint, norm.forward, use_reentrant=False)
        by_rows = _by_rows(recomputed, accumulation, are_alike=True)
        accumulation.undo_first(set_attribute(norm, "forward", by_rows))
    log.info(
        "Accumulation: %d layers take the micro-batches of a step one after the other, %d rows each, before the next "
        "layer runs.",
        len(layers),
        rows_per_micro_batch,
    )
    if dropout := _largest_dropout(parts.model):
        log.info(
            "Dropout (%g) draws other random numbers in vertical order than in horizontal: their losses differ as "
            "with two seeds.",
            dropout,
        )
    return accumulation


def _largest_dropout(model: nn.Module) -> float:
    """Return the largest dropout: of torch's modules, LoRA's included, or a number passed to attention."""
    modules = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    numbers = [
        value
        for module in model.modules()
        for name, value in vars(module).items()
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float)
    ]
    return max((*modules, *numbers), default=0.0)


class RowsCannotBeCutError(ModelError):
    """A model's layers cannot be computed a few rows at a time.

    Args:
        why: a clause with the reason.
        way_out: a sentence, for a recipe that asks for this order.
    """

    def __init__(self, why: str, way_out: str = "Set accumulation.order=horizontal.") -> None:
        super().__init__(
            f"accumulation.order=vertical computes the layers a few rows at a time, but {why}. {way_out}"
        )
        self.why = why


def check_vertical_accumulation(model: nn.Module | ModelParts) -> None:
    """Reject a model whose layers cannot take its rows a few at a time.

    Raises:
        ModelError: if it has no single stack of decoder layers.
        RowsCannotBeCutError: if it encodes positions as a bias of each head, adds a loss of its routers, or has an
            attention kernel whose mask cannot be cut.
    """
    parts = ModelParts.of(model)
    taken, config = inspect.signature(parts.layers()[0].forward).parameters, parts.model.config
    biases = [name for name in _POSITION_BIASES if name in taken]
    # Falcon's layers take it, and get it if its config says so.
    if biases and getattr(config, "alibi", True):
        raise _cannot_be_cut(f"the argument {biases[0]}")
    if getattr(config.get_text_config(), "output_router_logits", False):
        raise RowsCannotBeCutError(
            "the routers' load-balancing loss is computed over all its rows (output_router_logits is true in its "
            "config)",
            "Set accumulation.order=horizontal, or output_router_logits to false in its config.json.",
        )
    if config._attn_implementation == "flex_attention":
        raise RowsCannotBeCutError(
            "the block mask of model.attn_implementation=flex_attention cannot be cut by rows",
            "Set model.attn_implementation=sdpa.",
        )


def _norms_beside(layers: nn.ModuleList, model: nn.Module) -> list[nn.Module]:
    """Return the final norm and others of a whole batch: what a norm keeps in fp32 equals several layers' inputs."""
    parent = next(module for module in model.modules() if layers in module.children())
    return [module for module in parent.children() if type(module).__name__.endswith("Norm")]


def _checkpoints_all_of(layer: nn.Module) -> bool:
    """Return whether a forward set on a layer runs inside its checkpoint: all micro-batches are recomputed at once.

    This holds in transformers 5.17 to 5.22, whose layers checkpoint their ``__call__``; in 5.23 they checkpoint their
    own forward.
    """
    return getattr(layer, "gradient_checkpointing", False) and "__call__" in vars(GradientCheckpointingLayer)


def _checkpoint_inside(layer: Any) -> Iterator[Callable[[], None]]:
    """Move the checkpoint around a layer's call into its forward, for as long as the layer is checkpointed at all."""
    checkpoints: list[Callable[..., Any]] = []

    def only_calls(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        checkpoints.append(checkpoint)
        return lambda function, *args: function(*args)

    yield wrap_method(layer, "_gradient_checkpointing_func", only_calls)
    yield wrap_method(layer, "forward", functools.partial(_checkpointed, layer, *checkpoints))


def _checkpointed(
    layer: Any, checkpoint: Callable[..., Any], forward: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not (layer.training and layer.gradient_checkpointing):
            return forward(*args, **kwargs)
        return checkpoint(functools.partial(forward, **kwargs), *args)

    return checkpointed


def _by_rows(
    forward: Callable[..., Any], accumulation: VerticalAccumulation, *, are_alike: bool
) -> Callable[..., Any]:
    @functools.wraps(forward)
    def by_rows(*args: Any, **kwargs: Any) -> Any:
        hidden_BTH = args[0] if args else kwargs["hidden_states"]
        num_rows, at_once = len(hidden_BTH), accumulation.rows_at_once(hidden_BTH.shape[1])
        if not torch.is_grad_enabled() or num_rows <= at_once:
            return forward(*args, **kwargs)
        # Several streams of a token may be the third axis (hyper-connections) or the first (Gemma 3n).
        if hidden_BTH.ndim != 3 and hidden_BTH.shape[:2] != accumulation.shape_BT:
            raise _cannot_be_cut(
                f"hidden states of {hidden_BTH.ndim} axes, of which the first two are not rows and tokens"
            )
        starts = range(0, num_rows, at_once)
        micro_batches = [slice(start, min(start + at_once, num_rows)) for start in starts]
        gradients: dict[int, _GradientOfAllRows] = {}
        output = None
        for rows in rounds(micro_batches) if are_alike else micro_batches:
            cut = functools.partial(_cut, rows=rows, of=num_rows, gradients=gradients)
            part = forward(*map(cut, args), **{key: cut(value) for key, value in kwargs.items()})
            output = _with_rows_written(output, part, rows, num_rows)
        return output

    return by_rows


def _cannot_be_cut(what: str) -> RowsCannotBeCutError:
    return RowsCannotBeCutError(f"those of this model take {what}, which cannot be cut by rows")


def _cut(value: Any, rows: slice, of: int, gradients: dict[int, _GradientOfAllRows]) -> Any:
    """Return a micro-batch's part of an argument: tensors with the batch's rows are cut, others are shared."""
    if isinstance(value, Tensor):
        if value.ndim < 2 or len(value) != of:
            return value
        if not value.requires_grad:
            return value[rows]
        gradient = gradients.setdefault(id(value), _GradientOfAllRows())
        gradient.num_parts += 1
        return _Rows.apply(value, rows, gradient)
    cut = functools.partial(_cut, rows=rows, of=of, gradients=gradients)
    if isinstance(value, dict):
        return {key: cut(item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map(cut, value))
    return value


def _with_rows_written(output: Any, part: Any, rows: slice, num_rows: int) -> Any:
    """Return the output of all rows with a micro-batch's written into it; the first one allocates it."""
    if part is None:
        return None
    if isinstance(part, Tensor):
        if output is None:
            output = part.new_empty((num_rows, *part.shape[1:]))
        return _RowsWritten.apply(output, part, rows)
    if isinstance(part, tuple):
        outputs = [None] * len(part) if output is None else output
        return tuple(
            _with_rows_written(whole, item, rows, num_rows) for whole, item in zip(outputs, part, strict=True)
        )
    raise RowsCannotBeCutError(
        f"those of this model return something other than tensors: {type(part).__name__}"
    )


class _GradientOfAllRows:
    """The gradient of an argument, written by the micro-batches one after the other.

    Attributes:
        num_parts: micro-batches that have taken their rows of the argument.
    """

    def __init__(self) -> None:
        self.num_parts = 0
        self._num_written = 0
        self._whole: Tensor | None = None

    def write(self, part: Tensor, rows: slice, num_rows: int) -> Tensor | None:
        """Write a micro-batch's part; return the whole once it is complete, and None before."""
        if self._whole is None:
            self._whole = part.new_empty((num_rows, *part.shape[1:]))
        self._whole[rows] = part
        self._num_written += 1
        if self._num_written < self.num_parts:
            return None
        whole, self._whole, self._num_written = self._whole, None, 0
        return whole


class _Rows(torch.autograd.Function):
    """A micro-batch's rows of a tensor; a slice's backward would create a gradient of all rows for each."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, rows: slice, gradient: _GradientOfAllRows) -> Tensor:
        ctx.rows, ctx.gradient, ctx.num_rows = rows, gradient, len(whole)
        return whole[rows]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: Tensor) -> tuple[Tensor | None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.gradient.write(d_rows, ctx.rows, ctx.num_rows), None, None


class _RowsWritten(torch.autograd.Function):
    """A tensor with a micro-batch's rows written into it; an assignment's backward would copy the whole each time."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, part: Tensor, rows: slice) -> Tensor:
        ctx.rows = rows
        ctx.mark_dirty(whole)
        whole[rows] = part
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_whole: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return d_whole, d_whole[ctx.rows], None
