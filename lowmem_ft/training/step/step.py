"""The optimizer step, one implementation for real runs and for traces on a virtual device.

One step takes a *window*: all micro-batches between two updates. Its loss is the mean over every label token of the
whole window, in all processes: each micro-batch adds its *sum* divided by that one count. A mean of means would weight
a token by how short its micro-batch happens to be.

A step is a transaction: :meth:`WindowPass.gradients` changes nothing that cannot be rolled back, and
:func:`apply_gradients` commits. If memory ran out, ``retry.py`` repeats the first part. Updates of the previous step,
which streamed layers apply at their next visit, are not part of the transaction and are never rolled back.

The commit begins before the host knows loss and norm: they are on their way while it launches the kernels that update
weights. A kernel writes nothing if loss or norm is not finite; whatever else changes weights, state, schedule or loss
scale waits for the answer. When :func:`apply_gradients` returns, the result is known and all work of the step is
queued, and a step that was not finite has left everything as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from lowmem_ft.data.batches.batch import Batch, LabelledRows, merged
from lowmem_ft.data.batches.splitting import pieces
from lowmem_ft.techniques.attention.document_masks import masks_keep_documents_apart
from lowmem_ft.techniques.attention.varlen_attention import border_inputs, borders_arrive
from lowmem_ft.techniques.loss.router_loss import padding_left_out, router_loss_off, weighted_router_loss
from lowmem_ft.training.step.machine import one_type_needed
from lowmem_ft.training.step.outcome import PendingOutcome
from lowmem_ft.training.step.session import ForwardSession, Session


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step.

    Args:
        loss: mean negative log-likelihood over the window's label tokens, in nats, and the share of ``aux_loss``.
        grad_norm: global gradient norm before clipping.
        num_tokens: tokens of the window that are not padding, in all processes.
        applied: False if loss or norm are not finite, which leaves the weights unchanged.
        overflow: True if only the fp16 loss scale can be the cause; the step lowers it.
        aux_loss: load-balancing loss of the routers before its coefficient, the mean over the window's micro-batches
            in all processes; None: the model's config does not ask for it.
    """

    loss: float
    grad_norm: float
    num_tokens: int
    applied: bool
    overflow: bool
    aux_loss: float | None = None


def train_step(session: Session, window: Sequence[Batch]) -> StepResult:
    """Run forward and backward over every micro-batch, clip, update the weights, advance the schedule.

    A non-finite loss or gradient norm leaves weights, optimizer state and schedule unchanged, except where weights
    are updated in backward without clipping (``Technique.updates_at_once``).

    Args:
        session: model, optimizer, schedule and runtime; changed in place.
        window: this process's micro-batches; every process passes the same number. In vertical order the model gets all
            of them at once, and its layers process them one after the other.

    Returns:
        The result, which is equal in all processes.
    """
    return apply_gradients(session, WindowPass(session, window).gradients())


@dataclass
class WindowPass:
    """The part of a step before any weight changes: one forward and backward pass, and clipping.

    Args:
        session: see :func:`train_step`.
        window: see :func:`train_step`.
        max_tokens: maximum tokens per piece into which micro-batches are split (``data/batches/splitting.py``), under
            the normaliser of the unsplit window; None: they are not split. In vertical order the layers split them.

    Attributes:
        working_on: the rows that the model is processing, or was processing when an error ended the pass; None: the
            pass has not begun, or has ended.
    """

    session: Session
    window: Sequence[Batch]
    max_tokens: int | None = None
    working_on: LabelledRows | None = field(default=None, init=False)

    def gradients(self) -> PendingStep:
        """Compute the gradients, and leave them where the weight update expects them; the host does not wait."""
        session, ranks = self.session, self.session.runtime.ranks
        machine = session.runtime.machine
        num_label_tokens, num_tokens = _count_tokens(session, self.window)
        loss = torch.zeros((), dtype=torch.float32, device=machine.device)
        aux_loss: torch.Tensor | None = None
        micro_batches = self.micro_batches()
        share = 1 / ranks.plan.in_all(len(micro_batches))
        for index, self.working_on in enumerate(micro_batches):
            with ranks.micro_batch(session.model, is_last=index == len(micro_batches) - 1):
                micro_loss, micro_aux_loss = _forward(session, self.working_on, num_label_tokens, share)
                machine.backward(micro_loss)
            loss += micro_loss.detach()
            if micro_aux_loss is not None:
                aux_loss = micro_aux_loss * share + (0 if aux_loss is None else aux_loss)
        self.working_on = None
        loss = ranks.sum(loss)
        ranks.reduce_gradients(session.trainable_parameters())
        grad_norm = session.clip_grad_norm(loss)
        further = () if aux_loss is None else (ranks.sum(aux_loss),)
        return PendingStep(PendingOutcome(machine, loss, grad_norm, *further), num_tokens)

    def micro_batches(self) -> Sequence[LabelledRows]:
        """Return the rows that the model gets, one item per forward pass."""
        if self.session.techniques.takes_whole_window:
            return [merged(self.window)]
        return [piece for batch in self.window for piece in pieces(batch, self.max_tokens)]


@dataclass(frozen=True)
class PendingStep:
    """A step whose gradients wait for the update.

    Args:
        pending: its loss and norm.
        num_tokens: its tokens that are not padding, in all processes.
    """

    pending: PendingOutcome
    num_tokens: int


def apply_gradients(session: Session, step: PendingStep) -> StepResult:
    """End a step: update the weights and advance the schedule, or leave both unchanged if gradients are not finite."""
    session.update_weights(step.pending.is_finite)
    outcome = step.pending.outcome
    if outcome.applied:
        session.scheduler.step()
    session.optimizer.zero_grad()
    return StepResult(
        outcome.loss, outcome.grad_norm, step.num_tokens, outcome.applied, outcome.overflow, *outcome.further
    )


def evaluation_loss(
    session: ForwardSession, batches: Iterable[LabelledRows]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed negative log-likelihood (fp32) and label token count of this process's batches; keep no logits.

    Both are 0-d tensors on the device. A loss of routers is no part of it.
    """
    device = session.runtime.machine.device
    loss_sum = torch.zeros((), dtype=torch.float32, device=device)
    num_label_tokens = torch.zeros((), dtype=torch.int64, device=device)
    with torch.no_grad(), router_loss_off(session.unwrapped_model):
        for batch in batches:
            loss_sum += _forward(session, batch, num_items=1)[0]
            num_label_tokens += batch.num_label_tokens
    return loss_sum, num_label_tokens


def _count_tokens(session: Session, window: Sequence[Batch]) -> tuple[int, int]:
    """Return the label tokens and the tokens of the window, each summed over all processes."""
    counts = [sum(batch.num_label_tokens for batch in window), sum(batch.num_tokens for batch in window)]
    if session.runtime.ranks.num_processes > 1:
        totals = session.runtime.ranks.sum(torch.tensor(counts, device=session.runtime.machine.device))
        counts = totals.tolist()
    return max(counts[0], 1), counts[1]


def _forward(
    session: ForwardSession, batch: LabelledRows, num_items: int, share: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the micro-batch's summed loss divided by ``num_items``, and the loss of its routers.

    The first includes the second times its coefficient and ``share``; None: the model adds none.
    """
    machine = session.runtime.machine
    further_inputs = session.techniques.before_forward(batch.input_ids_BT, batch.num_label_tokens)
    attention = session.unwrapped_model.config._attn_implementation
    further_inputs |= border_inputs(attention or "", batch.position_ids_BT, machine.device)
    batch = batch.to(machine.device)
    inputs = dict(batch.model_inputs(), labels=batch.labels_BT, use_cache=False, num_items_in_batch=num_items)
    lengths = batch.lengths if isinstance(batch, Batch) else None
    with (
        one_type_needed(type(session.unwrapped_model).__name__, machine.mixed_precision),
        machine.autocast(),
        borders_arrive(further_inputs),
        masks_keep_documents_apart(session.unwrapped_model, batch.position_ids_BT),
        padding_left_out(session.unwrapped_model, lengths, batch.input_ids_BT.shape),
    ):
        outputs = session.model(**inputs, **further_inputs)
    loss, of_routers = outputs.loss.float(), weighted_router_loss(session.unwrapped_model, outputs)
    if of_routers is None:
        return loss, None
    if share != 1:
        loss = loss + (share - 1) * of_routers.float()
    return loss, outputs.aux_loss.detach().float()
