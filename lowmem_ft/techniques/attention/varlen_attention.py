"""Variable-length attention: packed documents are separated by their boundaries, without a mask.

The kernel is torch's own flash attention, over documents end to end (``torch.nn.attention.varlen``), for which nothing
has to be installed. A mask of tokens x tokens would keep sdpa from that kernel, and to build one, transformers makes a
host sync in each forward, to see whether rows are packed. Rows of one document go to ``scaled_dot_product_attention``
as causal.

Transformers builds no mask for an implementation under whose name no mask function is registered
(``masking_utils._preprocess_mask_arguments``). A padding mask is dropped the same way: rows must be padded on the
right, as in :class:`~lowmem_ft.data.batches.batch.LabelledRows`, to use this implementation.

Axes: B rows, E borders of a row, T tokens of a row, H query heads, K key heads, D head size.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from lowmem_ft.foundation.devices import sent_to
from lowmem_ft.foundation.errors import ModelError, UserError
from lowmem_ft.techniques.attention.grouped_attention import causal_attention, target_dtype

VARLEN_ATTENTION = "varlen_attn"
"""The value of ``model.attn_implementation``, named after torch's function."""

_BORDERS = "document_borders"
_LONGEST = "longest_document"
_ROWS = "document_rows"


@functools.cache
def register_varlen_attention() -> None:
    """Register the implementation with transformers, once per process."""
    AttentionInterface.register(VARLEN_ATTENTION, _varlen_attention_forward)


def border_inputs(
    implementation: str, position_ids_BT: Tensor | None, device: torch.device
) -> dict[str, Any]:
    """Return further inputs of a model's forward, so that no kernel needs a host sync to find where documents end.

    Args:
        implementation: the attention that the model was loaded with.
        position_ids_BT: on the host; they begin at 0 with each document. None: each row is one document.
        device: the model's device.

    Returns:
        Keyword arguments that transformers passes to the attention function. For flash-attn they are its own
        (``FlashAttentionKwargs``), which must not be cut by rows.
    """
    if position_ids_BT is None:
        return {}
    if implementation == VARLEN_ATTENTION:
        borders_BE, longest = _document_borders(position_ids_BT)
        return {_BORDERS: sent_to(borders_BE, device), _LONGEST: longest, _ROWS: len(borders_BE)}
    if implementation == "flash_attention_2" and len(position_ids_BT) == 1:
        borders_BE, longest = _document_borders(position_ids_BT)
        borders_E = sent_to(borders_BE[0], device)
        lengths = {"max_length_q": longest, "max_length_k": longest}
        return {"cu_seq_lens_q": borders_E, "cu_seq_lens_k": borders_E, **lengths}
    return {}


def _document_borders(position_ids_BT: Tensor) -> tuple[Tensor, int]:
    """Return where the documents of each row begin, and where the last ends, counted over all rows end to end.

    A row with fewer documents than another repeats its end: documents without tokens, which cost nothing. So the rows
    may be cut, and the rest flattened, as :func:`_varlen_attention_forward` does.

    Args:
        position_ids_BT: on the host.

    Returns:
        int32, B x E, and the tokens of the longest document.
    """
    num_rows, length = position_ids_BT.shape
    starts = [torch.nonzero(row_T == 0).flatten().tolist() for row_T in position_ids_BT]
    rows = [[0, *(start for start in row if start), length] for row in starts]
    most = max(map(len, rows))
    borders_BE = torch.tensor([row + [length] * (most - len(row)) for row in rows], dtype=torch.int32)
    longest = int(borders_BE.diff(dim=1).max())
    return borders_BE + torch.arange(0, num_rows * length, length, dtype=torch.int32)[:, None], longest


class _Watch:
    """Record of whether the document boundaries of a forward pass reached attention."""

    has_arrived = False


_watch = _Watch()


@contextlib.contextmanager
def borders_arrive(inputs: dict[str, Any]) -> Iterator[None]:
    """Reject a model that does not pass its keyword arguments on to attention: packed documents would see each other.

    Args:
        inputs: the inputs of its forward in the ``with`` block.

    Raises:
        ModelError: if the inputs have document boundaries, but none reached attention.
    """
    _watch.has_arrived = False
    yield
    if _BORDERS in inputs and not _watch.has_arrived:
        raise ModelError(
            f"With model.attn_implementation={VARLEN_ATTENTION} packed rows need a model whose layers pass their "
            "keyword arguments on to attention, but this one does not: its documents would see each other. Set "
            "model.attn_implementation=sdpa."
        )


def _varlen_attention_forward(
    module: nn.Module,
    query_BHTD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    document_borders: Tensor | None = None,
    longest_document: int | None = None,
    document_rows: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention; transformers calls this in each layer.

    Args:
        module: the attention layer.
        query_BHTD: queries.
        key_BKTD: keys; K divides H.
        value_BKTD: values, whose D may be another.
        attention_mask: always None; models that build their own mask are rejected.
        dropout: on scores; 0 for packed rows and sliding windows.
        scaling: factor on the scores; None: one over the square root of D.
        sliding_window: how many keys a query sees, itself included; None: all before it.
        is_causal: whether attention is causal; None: the module's own value.
        document_borders: from :func:`border_inputs`, or some of its rows; None: each row is one document.
        longest_document: likewise.
        document_rows: how many rows of borders there were before any cut; None: unknown.
        kwargs: arguments of other implementations.

    Returns:
        The output, B x T x H x D, and None for the scores.

    Raises:
        UserError: if the call needs a feature that the kernel does not have.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    _refuse(query_BHTD, key_BKTD, attention_mask, causal, kwargs)
    num_rows, _, length, _ = query_BHTD.shape
    longest = length if longest_document is None else longest_document
    has_window = sliding_window is not None and sliding_window < longest
    if document_borders is None and not has_window:
        return causal_attention(
            module, query_BHTD, key_BKTD, value_BKTD, dropout=dropout, scaling=scaling
        ), None
    if dropout:
        raise _refused(
            f"dropout of scores ({dropout})", "Set attention_dropout to 0 in the model's config, or"
        )
    if document_borders is None:
        borders_E = torch.arange(
            0, (num_rows + 1) * length, length, dtype=torch.int32, device=query_BHTD.device
        )
    else:
        _watch.has_arrived = True
        borders_E = document_borders.flatten()
        if len(document_borders) != document_rows:
            borders_E = borders_E - document_borders[0, 0]  # cut rows may begin anywhere
    window = (sliding_window - 1, 0) if sliding_window is not None and has_window else (-1, 0)
    output = _end_to_end(module, (query_BHTD, key_BKTD, value_BKTD), borders_E, longest, scaling, window)
    return output.unflatten(0, (num_rows, length)), None


def _end_to_end(
    module: nn.Module,
    operands: tuple[Tensor, Tensor, Tensor],
    borders_E: Tensor,
    longest: int,
    scaling: float | None,
    window: tuple[int, int],
) -> Tensor:
    """Run the kernel over all rows end to end: tokens x H x D."""
    from torch.nn.attention.varlen import varlen_attn

    size, value_size = operands[0].size(-1), operands[2].size(-1)
    width = -(-max(size, value_size) // 8) * 8  # the kernel takes one size, a multiple of 8
    half = target_dtype(operands[0], module)
    query, key, value = (
        _padded(operand.to(half), width).transpose(1, 2).flatten(0, 1) for operand in operands
    )
    output: Any = varlen_attn(
        query,
        key,
        value,
        borders_E,
        borders_E,
        longest,
        longest,
        scale=size**-0.5 if scaling is None else scaling,
        window_size=window,
        **_gqa(varlen_attn),
    )
    return output if value_size == width else output[..., :value_size]


def _padded(operand: Tensor, width: int) -> Tensor:
    missing = width - operand.size(-1)
    return F.pad(operand, (0, missing)) if missing else operand


@functools.cache
def _gqa(kernel: Any) -> dict[str, Any]:
    """Return ``enable_gqa`` if the kernel has it (torch 2.12 on); earlier ones take shared key heads without it."""
    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(kernel).parameters else {}


def _refuse(
    query_BHTD: Tensor, key_BKTD: Tensor, mask: Tensor | None, is_causal: bool, further: dict[str, Any]
) -> None:
    if query_BHTD.size(2) != key_BKTD.size(2):
        raise _refused(
            "a cache of keys, as in text generation", "Call model.set_attn_implementation('sdpa'), or"
        )
    if mask is not None or not is_causal:
        raise _refused("a mask of the model's own" if is_causal else "attention to later tokens")
    for name in ("softcap", "s_aux", "position_bias"):
        if further.get(name) is not None:
            raise _refused(name)


def _refused(what: str, way_out: str = "Load the model with another:") -> UserError:
    return UserError(
        f"attn_implementation={VARLEN_ATTENTION} trains causal models and does not support {what}. {way_out} "
        "attn_implementation=sdpa."
    )
