"""Retry of a step after an out-of-memory error: the step restarts in smaller pieces, and nothing is lost.

``step.py`` says when a step commits. Everything before that can be discarded: gradients, whether
stored or in transit, the fp16 scaler's record of them, and the random numbers drawn. The window is then repeated under
the same normaliser with the part that was running cut in two (:class:`MicroBatchLimit`), and so are all later windows:
the run equals, bit for bit, one that is resumed from the state before that step with that limit.

The part that was running decides what is made smaller. In horizontal order it is the rows of a micro-batch, as all that
it keeps is proportional to them; once a row cannot be split, it is the chunk of the loss, if memory ran out in the
loss. In vertical order the layers take fewer rows at a time, which frees nothing of a loss that sees all rows: there
the chunk comes first. An optimizer that steps in backward takes each gradient once per step, so that its only
micro-batch is not split; instead the run changes to vertical order, if its layers are checkpointed. A change that would
free nothing is not tried.

These errors are not retried, and :class:`NotRetried` gives the reason: an error inside an update, even one of the
previous step that a streamed layer applies at its visit; one in backward without clipping, where weights change at
once; one of a model whose rows couple, through a loss over all rows' routers or through batch norm; and one in several
processes, which would have to agree on the retry before any of them enters a collective.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from lowmem_ft.data.batches.batch import Batch, LabelledRows
from lowmem_ft.data.batches.splitting import half_of, half_of_rows
from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.foundation.system.device_memory import free_device_bytes
from lowmem_ft.foundation.tensors.autograd_queue import EngineQueue
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.recipe import Recipe
from lowmem_ft.techniques.accumulation.float32_accumulation import Float32Accumulation
from lowmem_ft.techniques.accumulation.fused_accumulation import FusedAccumulation
from lowmem_ft.techniques.accumulation.vertical_accumulation import (
    RowsCannotBeCutError,
    VerticalAccumulation,
    check_vertical_accumulation,
    enable_vertical_accumulation,
)
from lowmem_ft.techniques.loss.chunked_loss import ChunkedLoss
from lowmem_ft.techniques.loss.router_loss import has_router_loss
from lowmem_ft.techniques.modules.model_parts import decoder_layers
from lowmem_ft.techniques.optimizer_in_backward import InBackward
from lowmem_ft.training.folder.micro_batch_limit import MicroBatchLimit
from lowmem_ft.training.out_of_memory.error import INSIDE_AN_UPDATE, NotRetried, is_out_of_memory, not_retried
from lowmem_ft.training.out_of_memory.step_rollback import StepRollback
from lowmem_ft.training.step.enabled_techniques import SUMS, Build
from lowmem_ft.training.step.session import ForwardSession, Session
from lowmem_ft.training.step.step import PendingStep, StepResult, WindowPass, apply_gradients

logger = logging.getLogger(__name__)

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class Retries:
    """Steps of a session with retries after out-of-memory errors, and the micro-batch limit so far.

    Args:
        session: the session that takes the steps.
        recipe: the recipe from which it was built.

    Attributes:
        cut: the limit in force from the next window on.
        num_retries: retries of the last step.
    """

    def __init__(self, session: Session, recipe: Recipe) -> None:
        self.cut = MicroBatchLimit()
        self.num_retries = 0
        self.session = session
        self._recipe = recipe
        self._engine_queue = EngineQueue(session.runtime.machine.device)

    def train_step(self, window: Sequence[Batch]) -> StepResult:
        """Run :func:`lowmem_ft.training.step.step.train_step`, and repeat it in smaller pieces while memory runs out.

        Raises:
            NotRetried: if memory ran out and a retry is not possible.
        """
        self.num_retries = 0
        while (gradients := self._gradients(window)) is None:
            self.num_retries += 1
        with not_retried(INSIDE_AN_UPDATE):
            return apply_gradients(self.session, gradients)

    def metrics(self) -> dict[str, int]:
        """Return metrics of the last step; empty in a run whose memory has never run out."""
        return {**({"retries": self.num_retries} if self.num_retries else {}), **self.cut.metrics()}

    def apply(self, cut: MicroBatchLimit) -> None:
        """Make the session work within a limit; techniques that this needs are enabled permanently."""
        self.cut = cut
        techniques = self.session.techniques
        if cut.max_tokens is not None:
            self._go_over_to_vertical_order()
            self._sum_gradients()
        vertical, loss = techniques.find(VerticalAccumulation), techniques.find(ChunkedLoss)
        if vertical is not None:
            vertical.max_tokens = cut.max_tokens
        if loss is not None:
            loss.limit_chunk(cut.max_loss_tokens)

    def _gradients(self, window: Sequence[Batch]) -> PendingStep | None:
        """Return the window's gradients; None if memory ran out and the state was rolled back, with a smaller limit."""
        attempt, before = WindowPass(self.session, window, self.cut.max_tokens), None
        try:
            before = StepRollback.of(self.session.unwrapped_model, self.session.runtime.machine.device)
            return attempt.gradients()
        except Exception as error:
            if isinstance(error, RowsCannotBeCutError) and self._recipe.accumulation.order == "horizontal":
                raise self._not_inside_the_layers(error.why) from error
            if not is_out_of_memory(error):
                raise
            try:
                smaller = self._smaller(attempt)
            except NotRetried as refusal:
                raise refusal from error
            message = str(error).strip().partition("\n")[0]
        # Outside the except block: until here the error has kept the tensors of all its frames alive.
        del attempt
        self._forget_window()
        if before is not None:
            before.restore()
        self._refuse_without_room_for_sums(smaller)
        self.apply(smaller)
        logger.warning(
            "Device memory ran out before any weight of this step had changed (%s). Nothing is lost: the step starts "
            "over from the same state with %s at a time, and so does the run from here on, resumed or not. The "
            "mathematics is the same, but sums are computed in another order: from here on results match a run "
            "started with this limit.",
            message,
            smaller,
        )
        return None

    def _forget_window(self) -> None:
        """Discard the window, without allocating on the device: it may be full until the last line."""
        session = self.session
        self._engine_queue.empty()
        abandon(session)
        session.optimizer.zero_grad()
        session.runtime.machine.abandon_step()
        give_memory_back(session.runtime.machine.device)

    # --- what to make smaller -----------------------------------------------------------------------------------------

    def _smaller(self, attempt: WindowPass) -> MicroBatchLimit:
        self._refuse_what_cannot_start_over()
        ways: list[Callable[[WindowPass], MicroBatchLimit | None]] = [
            self._with_fewer_tokens,
            self._with_smaller_chunk,
        ]
        if self.session.techniques.takes_whole_window:
            ways.reverse()
        smaller = next((cut for way in ways if (cut := way(attempt)) is not None), None)
        if smaller is None:
            if (why := self._why_not_inside_the_layers()) and len(_running(attempt)[0].input_ids_BT) > 1:
                raise self._not_inside_the_layers(why)
            raise NotRetried(
                "It could not start over with smaller micro-batches: the failing part works on a single row or "
                "document, or does not depend on rows."
            )
        return smaller

    def _refuse_what_cannot_start_over(self) -> None:
        session = self.session
        if not self._recipe.budget.retry:
            raise NotRetried("budget.retry=false: it did not start over with smaller micro-batches.")
        if session.runtime.ranks.num_processes > 1:
            raise NotRetried("With several processes a step does not start over.")
        if session.techniques.is_updating:
            raise NotRetried(INSIDE_AN_UPDATE)
        if session.techniques.updates_at_once:
            raise NotRetried(
                "optimizer.in_backward without clipping changes weights during backward, so the step could not start "
                "over; with training.max_grad_norm=1.0 it can."
            )

    def _with_fewer_tokens(self, attempt: WindowPass) -> MicroBatchLimit | None:
        """Return a limit of half the running rows, or of the largest rows if memory ran out outside the model."""
        techniques = self.session.techniques
        in_layers = techniques.takes_whole_window or techniques.find(InBackward) is not None
        halves = [
            self._half_of_layers_rows(rows) if in_layers else half_of(rows) for rows in _running(attempt)
        ]
        half = max((half for half in halves if half is not None), default=None)
        if half is None:
            return None
        if (why := why_rows_couple(self.session.unwrapped_model)) is not None:
            raise NotRetried(f"Its micro-batches cannot be cut: {why}.")
        return dataclasses.replace(self.cut, max_tokens=half)

    def _half_of_layers_rows(self, rows: LabelledRows) -> int | None:
        num_rows, length = rows.input_ids_BT.shape
        vertical = self.session.techniques.find(VerticalAccumulation)
        if self._why_not_inside_the_layers() is not None:
            return None
        at_once = num_rows if vertical is None else min(num_rows, vertical.rows_at_once(length))
        return half_of_rows(at_once, length)

    def _with_smaller_chunk(self, attempt: WindowPass) -> MicroBatchLimit | None:
        loss = self.session.techniques.find(ChunkedLoss)
        if loss is None or not loss.is_running or attempt.working_on is None:
            return None
        chunk = loss.smaller_chunk(attempt.working_on.num_label_tokens)
        return None if chunk is None else dataclasses.replace(self.cut, max_loss_tokens=chunk)

    # --- what a cut needs ---------------------------------------------------------------------------------------------

    def _why_not_inside_the_layers(self) -> str | None:
        """Return why layers cannot split micro-batches where an optimizer steps in backward; None if they can.

        There each gradient is used as backward finishes it, so that only vertical order can split a micro-batch.
        """
        techniques, model = self.session.techniques, self.session.unwrapped_model
        if techniques.find(InBackward) is None or techniques.find(VerticalAccumulation) is not None:
            return None
        try:
            check_vertical_accumulation(model)
        except RowsCannotBeCutError as error:
            return error.why
        except ModelError:
            return "this model does not have a single stack of layers"
        # A layer without a checkpoint keeps its activations of all rows: a split would free next to nothing.
        is_cuttable = all(layer.gradient_checkpointing for layer in decoder_layers(model))
        return None if is_cuttable else "not all of them are checkpointed (checkpointing.mode=full)"

    def _not_inside_the_layers(self, why: str) -> NotRetried:
        return NotRetried(
            "It could not start over with smaller micro-batches: with optimizer.in_backward=true these are formed "
            f"inside the layers, but {why}. Set training.per_device_train_batch_size lower."
        )

    def _go_over_to_vertical_order(self) -> None:
        """Enable vertical order if the optimizer steps in backward: each gradient must come once per step."""
        techniques = self.session.techniques
        if techniques.find(InBackward) is None or techniques.find(VerticalAccumulation) is not None:
            return
        rows = self._recipe.training.per_device_train_batch_size
        techniques.add(enable_vertical_accumulation(self.session.unwrapped_model, rows))

    @property
    def _sums_as_wanted(self) -> bool:
        """True if gradients of several micro-batches are already summed in ``accumulation.dtype``."""
        in_float32 = self.session.techniques.find(Float32Accumulation) is not None
        return in_float32 or self._recipe.accumulation.dtype == "weights"

    def _sum_gradients(self) -> None:
        """Enable what sums gradients if the recipe has one micro-batch, which needs no sum."""
        session, techniques = self.session, self.session.techniques
        if techniques.find(Float32Accumulation) or techniques.find(FusedAccumulation):
            return
        build = Build(
            model=session.unwrapped_model,
            recipe=self._recipe,
            host_memory=session.host_memory,
            sums=True,
            optimizer=session.optimizer,
            in_forward=techniques,
        )
        build.enable(SUMS, techniques)

    def _refuse_without_room_for_sums(self, cut: MicroBatchLimit) -> None:
        """Refuse to split a single micro-batch in two if there is no room to sum their gradients in float32."""
        if self._sums_as_wanted or cut.max_tokens is None:
            return
        sum_bytes = self._float32_sum_bytes()
        free_bytes = free_device_bytes(self.session.runtime.machine.device)
        if sum_bytes > free_bytes:
            raise NotRetried(
                "It could not start over with its micro-batch cut in two: the gradients of both would be summed in "
                f"float32 (accumulation.dtype), which takes {format_bytes(sum_bytes)} but only "
                f"{format_bytes(free_bytes)} are free."
            )

    def _float32_sum_bytes(self) -> int:
        """Return the bytes of float32 gradients of all trained 16-bit weights, or of the largest part of them.

        The largest part counts if the optimizer steps in backward. It is a layer, or a weight outside the layers unless
        its gradient comes in slices.
        """
        trained, techniques = self.session.trainable_parameters(), self.session.techniques
        if techniques.find(InBackward) is None:
            return _bytes_in_float32(trained)
        layers = [list(layer.parameters()) for layer in decoder_layers(self.session.unwrapped_model)]
        elsewhere = {*itertools.chain(*layers), *techniques.weights_in_slices()}
        beside = [[parameter] for parameter in trained if parameter not in elsewhere]
        return max(map(_bytes_in_float32, [*layers, *beside]))


def _running(attempt: WindowPass) -> Sequence[LabelledRows]:
    """Return the micro-batch that was running when memory ran out, or all of them if none was."""
    return attempt.micro_batches() if attempt.working_on is None else [attempt.working_on]


def why_rows_couple(model: nn.Module) -> str | None:
    """Return the reason why rows have to pass through a model together; None: they are independent."""
    if has_router_loss(model):
        return "the routers' load-balancing loss is computed over all its rows (output_router_logits)"
    if any(isinstance(module, _BATCH_NORMS) for module in model.modules()):
        return "batch norm is computed over all its rows"
    return None


def abandon(session: ForwardSession) -> None:
    """Make all techniques discard the failed pass, once the device is idle."""
    if session.runtime.machine.device.type == "cuda":
        torch.cuda.synchronize(session.runtime.machine.device)
    session.techniques.abandon()


def give_memory_back(device: torch.device) -> None:
    """Release device memory that nothing uses any more."""
    gc.collect()  # frames of an error may reference each other
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _bytes_in_float32(parameters: Iterable[nn.Parameter]) -> int:
    return sum(4 * p.numel() for p in parameters if p.requires_grad and p.dtype.itemsize < 4)
