"""The micro-batches of each optimizer step, and the position in the data from which a run can resume.

One optimizer step takes ``B x A x W`` consecutive rows of the global order: B rows a micro-batch, A micro-batches, W
different ones at a time (``plan.data_width``). Micro-batch ``j`` of a process whose ``plan.data_index`` is ``r`` takes
rows ``[(j * W + r) * B : (j * W + r + 1) * B]`` of them. So the set of rows of a step depends only on the global batch
size, not on how it is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from lowmem_ft.data.batches.batch import Batch
from lowmem_ft.data.batches.collating import Collator
from lowmem_ft.data.batches.epoch_rows import Examples
from lowmem_ft.data.batches.position import DataPosition
from lowmem_ft.data.row import Row
from lowmem_ft.foundation.errors import DataError
from lowmem_ft.foundation.parallel_plan import ParallelPlan


@dataclass(frozen=True, kw_only=True)
class Window:
    """The data of one optimizer step on this process.

    Args:
        batches: the micro-batches; as many on every process.
        position: position from which to resume after this step.
        epoch: epochs done after this step; when streaming, whole ones only.
    """

    batches: list[Batch]
    position: DataPosition
    epoch: float


class DataStream:
    """Endless windows of training data: one epoch follows the other.

    The last window of an epoch is short when the rows do not divide evenly: it may have fewer micro-batches, and a
    process without a share gets micro-batches without labels (``sample_ids=()``), which cost time but change no
    number. No row is repeated or left out.

    Args:
        examples: the rows, and their order.
        position: where to begin; its seed decides the order.
        per_device_batch_size: rows of a micro-batch.
        gradient_accumulation_steps: micro-batches of a window on each process.
        plan: the processes that share the data, and this one.
        collate: collates rows to a batch.

    Raises:
        DataError: if the position is beyond the end of the data.
    """

    def __init__(
        self,
        examples: Examples,
        *,
        position: DataPosition,
        per_device_batch_size: int,
        gradient_accumulation_steps: int,
        plan: ParallelPlan,
        collate: Collator,
    ) -> None:
        self._examples, self._collate = examples, collate
        self._batch_size, self._plan = per_device_batch_size, plan
        self._window_rows = plan.rows_at_once(per_device_batch_size) * gradient_accumulation_steps
        if examples.num_rows is not None and position.index >= examples.num_rows:
            raise DataError(
                f"The run stopped at row {position.index} of an epoch, but the data has {examples.num_rows} rows now. "
                "Resume with the data, data.max_length and data.packing that the run began with."
            )
        self.position = position
        self._references: Iterator[Any] | None = None

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps of one epoch, or None when streaming."""
        num_rows = self._examples.num_rows
        return None if num_rows is None else -(-num_rows // self._window_rows)

    @property
    def steps_done(self) -> int:
        """Optimizer steps of this size up to the position, a short one at an epoch's end counted as one.

        Equal to the steps taken, unless the run began with another number of rows per step.
        """
        num_rows, per_epoch = self._examples.num_rows, self.steps_per_epoch
        assert num_rows is not None, "a stream has no known length"
        assert per_epoch is not None
        left_in_epoch = -(-(num_rows - self.position.index) // self._window_rows)
        return (self.position.epoch + 1) * per_epoch - left_in_epoch

    def next_window(self) -> Window:
        """Return the data of the next optimizer step.

        Raises:
            DataError: if an epoch of streamed data holds no example, or its source cannot be read any more.
        """
        references = self._take()
        if not references:  # only a stream learns that an epoch is over by finding no more rows
            self._begin_next_epoch()
            references = self._take()
            if not references:
                raise DataError("The training data has no example, so that an epoch cannot begin.")
        self.position = replace(self.position, index=self.position.index + len(references))
        num_rows = self._examples.num_rows
        if num_rows is not None and self.position.index >= num_rows:
            self._begin_next_epoch()
        batches = _share(references, self._examples.read, self._batch_size, self._plan, self._collate)
        epoch = self.position.epoch + (self.position.index / num_rows if num_rows else 0.0)
        return Window(batches=batches, position=self.position, epoch=epoch)

    def _take(self) -> list[Any]:
        if self._references is None:
            self._references = self._examples.order(
                self.position.seed, self.position.epoch, self.position.index
            )
        return list(islice(self._references, self._window_rows))

    def _begin_next_epoch(self) -> None:
        self.position = replace(self.position, epoch=self.position.epoch + 1, index=0)
        self._references = None


def eval_batches(
    examples: Examples, *, batch_size: int, plan: ParallelPlan, collate: Collator
) -> Iterator[Batch]:
    """Yield the micro-batches of this process's share of held-out examples, in their order.

    Args:
        examples: created without shuffling.
        batch_size: rows of a micro-batch.
        plan: the processes that share the data, and this one.
        collate: collates rows to a batch.

    Yields:
        Batches, as many on every process; without labels if a process has no share.
    """
    references = examples.order(0, 0)
    while chunk := list(islice(references, plan.rows_at_once(batch_size))):
        yield from _share(chunk, examples.read, batch_size, plan, collate)


def _share(
    references: Sequence[Any],
    read: Callable[[Any], Row],
    batch_size: int,
    plan: ParallelPlan,
    collate: Collator,
) -> list[Batch]:
    """Return one process's micro-batches from rows that all processes share; as many for each of them."""
    batches = []
    for start in range(0, len(references), plan.rows_at_once(batch_size)):
        first = start + plan.data_index * batch_size
        own = references[first : first + batch_size]
        if own:
            batches.append(collate([read(reference) for reference in own]))
        else:  # this process's share is empty, but the others wait for it in their collectives
            batches.append(collate([read(references[start])], learn=False))
    return batches
