"""Checks by forward passes, where a model's code does not tell: which other tokens change its output for a token."""

from __future__ import annotations

import torch
from torch import nn

from lowmem_ft.data.batches.batch import Batch
from lowmem_ft.data.row import IGNORED_LABEL
from lowmem_ft.foundation.devices import has_values
from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.foundation.out_of_memory_errors import is_failed_allocation
from lowmem_ft.models.hf_config import vocab_size
from lowmem_ft.techniques.distributed.context_parallel import ContextParallel
from lowmem_ft.training.step.session import Session
from lowmem_ft.training.step.step import evaluation_loss

NUM_TOKENS = 16
TOLERANCE = 0.01
"""Tolerance as a share of the loss. A causal model's loss differs by rounding alone, most with 8-bit weights, whose
outliers are found over all tokens of a batch."""
EXACT_TOLERANCE = 1e-5
"""Tolerance of float32 weights. What masked attention leaves out adds exact zeros."""
PART_TOLERANCE = 0.02
"""Tolerance of what a part computes with 16-bit weights, as a share of the largest value: several rounding errors."""


def refuse_bidirectional_weights(session: Session, name: str) -> None:
    """Refuse a model whose loss changes when the last token, which is not a label, is replaced.

    The check takes two forward passes of one row. It is skipped for models of transformers' own whose attention modules
    call themselves causal; models/causality.py has already read the config.

    Args:
        session: the built model, before its first step.
        name: the model, as the user names it.

    Raises:
        ModelError: if the two losses differ, or the model cannot process text alone.
    """
    if _is_vouched_for(session.unwrapped_model):
        return
    # Special tokens are at the ends.
    middle = (vocab_size(session.unwrapped_model.config) or 4 * NUM_TOKENS) // 2
    ids_T = torch.arange(NUM_TOKENS) + max(0, middle - NUM_TOKENS)
    other_ids_T = ids_T.clone()
    other_ids_T[-1] = ids_T[0]
    session.model.eval()
    try:
        before, after = (float(evaluation_loss(session, [_batch(ids)])[0]) for ids in (ids_T, other_ids_T))
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if is_failed_allocation(error):
            raise
        raise ModelError(
            f"model.name_or_path needs a causal language model that takes text alone, but the forward of {name} "
            f"({type(session.unwrapped_model).__name__}) fails with it: {type(error).__name__}: {error} Choose a "
            "decoder, such as one of `lowmem-ft models`."
        ) from error
    finally:
        session.model.train()
    if abs(after - before) > TOLERANCE * abs(before):
        raise ModelError(
            f"model.name_or_path needs a causal language model, whose tokens see only earlier ones; in {name} "
            f"changing the last token changes the loss of earlier tokens from {before:.4f} to {after:.4f}. Choose a "
            "decoder, such as one of `lowmem-ft models`."
        )


def refuse_leaking_documents(session: Session, name: str) -> None:
    """Refuse to pack if a document of a row changes what the model computes for the one after it.

    Attention is masked by the borders of documents; states of recurrent layers, convolutions, choices of an indexer,
    positions that a model counts by itself and masks of its own pass over them in many models. The check takes two
    forward passes of one row. It compares all parts of the model: a convolution that reaches back two tokens hardly
    changes a loss.

    Args:
        session: the built model, before its first step.
        name: the model, as the user names it.

    Raises:
        ModelError: if the loss of the second document, or what a part computes for it, depends on the first.
    """
    middle = (vocab_size(session.unwrapped_model.config) or 4 * NUM_TOKENS) // 2
    first = max(0, middle - NUM_TOKENS)
    ids_T = torch.arange(first, first + NUM_TOKENS)
    other_ids_T = ids_T.clone()
    other_ids_T[: NUM_TOKENS // 2] += NUM_TOKENS
    is_exact = next(session.unwrapped_model.parameters()).dtype == torch.float32
    session.model.eval()
    try:
        (before, parts), (after, other_parts) = (
            _second_document(session, _two_documents(ids)) for ids in (ids_T, other_ids_T)
        )
    finally:
        session.model.train()
    leak = _first_leak(parts, other_parts, is_exact=is_exact)
    tolerance = EXACT_TOLERANCE if is_exact else TOLERANCE
    if leak is None and abs(after - before) <= tolerance * abs(before):
        return
    raise ModelError(
        f"data.packing=true needs a model whose documents do not see one another; in {name} other tokens in a row's "
        f"first document change the loss of its second from {before:.6g} to {after:.6g}"
        f"{f', first in {leak}' if leak else ''}. Set data.packing=false; data.group_by_length=true then saves most "
        "of the padding."
    )


def refuse_dependent_parts(session: Session, name: str) -> None:
    """Refuse to spread rows over processes if the loss of a row is then another.

    Attention reaches the tokens of all processes; states of recurrent layers, convolutions, positions that a model
    counts by itself and masks of its own do not. The check takes a forward pass of one row in each process, and one of
    its parts in all of them.

    Args:
        session: the built model, before its first step.
        name: the model, as the user names it.

    Raises:
        ModelError: if the two losses differ.
    """
    if session.techniques.find(ContextParallel) is None:
        return
    ranks = session.runtime.ranks
    is_exact = next(session.unwrapped_model.parameters()).dtype == torch.float32
    ids_T = torch.arange(4 * NUM_TOKENS * ranks.plan.context) % (
        vocab_size(session.unwrapped_model.config) or NUM_TOKENS
    )
    session.model.eval()
    try:
        whole = evaluation_loss(session, [_batch(ids_T)], in_parts=False)[0]
        parts = ranks.sum(evaluation_loss(session, [_batch(ids_T)])[0]) / ranks.plan.data_width
    finally:
        session.model.train()
    if not has_values(whole):
        return
    if abs(float(parts) - float(whole)) > (EXACT_TOLERANCE if is_exact else TOLERANCE) * abs(float(whole)):
        raise ModelError(
            f"distributed.context={ranks.plan.context} needs a model whose tokens see one another by attention alone; "
            f"in {name} the loss of a row is {float(whole):.6g}, and {float(parts):.6g} where its tokens are spread "
            "over processes. Set distributed.context=1."
        )


Parts = list[tuple[str, torch.Tensor]]
"""Names of a model's parts with each tensor that they returned, in the order in which they finished: a part before its
whole."""


def _second_document(session: Session, row: Batch) -> tuple[float, Parts]:
    """Return the loss of a row's second document, and what each part of the model computes for it, on the host."""
    parts: Parts = []

    def keep(name: str, module: nn.Module, output: object) -> None:
        # Parts of experts have no axis of rows: there, tokens are in the order of their experts.
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.is_floating_point()
                and tensor.shape[:2] == (1, NUM_TOKENS)
            ):
                half = tensor.detach()[:, NUM_TOKENS // 2 :].to("cpu", copy=True)
                parts.append((f"{name} ({type(module).__name__})", half))

    hooks = [
        part.register_forward_hook(lambda part, _, output, name=name: keep(name, part, output))
        for name, part in session.unwrapped_model.named_modules()
        if name
    ]
    try:
        return float(evaluation_loss(session, [row])[0]), parts
    finally:
        for hook in hooks:
            hook.remove()


def _first_leak(parts: Parts, other_parts: Parts, *, is_exact: bool) -> str | None:
    """Return the innermost part in which the first document reaches the second; None: none does.

    Rounding differs where experts get other tokens and where 8-bit weights find other outliers. In 16 bits the first
    part that differs decides, by all that it returns (a convolution may hardly change the queries, and replace the
    values of a token): a difference may have sent later tokens to other experts.
    """
    decides = None
    for (name, output), (_, other) in zip(parts, other_parts, strict=False):
        if not has_values(output):
            return None  # in a trace: the two passes count, there is nothing to compare
        if output.shape != other.shape or torch.equal(output, other):
            continue
        if not is_exact and decides not in (None, name):
            return None
        decides = name
        difference = (other.float() - output.float()).abs().max() / output.float().abs().max()
        if difference > (EXACT_TOLERANCE if is_exact else PART_TOLERANCE):
            return name
    return None


def _two_documents(input_ids_T: torch.Tensor) -> Batch:
    """Return a row of two documents of one length, of which the second alone has labels."""
    half = NUM_TOKENS // 2
    labels_BT = input_ids_T[None].clone()
    labels_BT[:, : half + 1] = IGNORED_LABEL
    return Batch(
        input_ids_BT=input_ids_T[None],
        labels_BT=labels_BT,
        position_ids_BT=torch.arange(half).repeat(2)[None],
        sample_ids=(0,),
        num_label_tokens=half - 1,
        num_tokens=NUM_TOKENS,
    )


def _is_vouched_for(model: nn.Module) -> bool:
    return type(model).__module__.startswith("transformers.models.") and any(
        getattr(module, "is_causal", False) is True for module in model.modules()
    )


def _batch(input_ids_T: torch.Tensor) -> Batch:
    input_ids_BT = input_ids_T[None]
    labels_BT = input_ids_BT.clone()
    labels_BT[:, [0, -1]] = IGNORED_LABEL
    return Batch(
        input_ids_BT=input_ids_BT,
        labels_BT=labels_BT,
        position_ids_BT=None,
        sample_ids=(0,),
        num_label_tokens=len(input_ids_T) - 2,
        num_tokens=len(input_ids_T),
    )
