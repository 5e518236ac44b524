"""An enabled technique, and all that any training loop has to ask of it.

A technique that only changes the model, its optimizer or autograd needs none of this. The rest are *moments* of a step
that :class:`Technique` lists; they do nothing unless a technique overrides them. ``training/step/step.py`` and
``training/step/session.py`` pass each to :class:`Techniques`, the ordered list of enabled techniques; so can any other
loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from lowmem_ft.foundation.handle import Handle

Unscale = Callable[[Tensor], None]
"""Divides a tensor of values that come from gradients by the fp16 loss scale, in place; records non-finite values."""


@dataclass(frozen=True)
class WeightMemory:
    """Memory that holds weights and is no parameter's own storage, so that its owner is not apparent.

    Args:
        memory: a tensor of bytes, on the device or the host.
        of: a parameter of the layer that it belongs to; None: several layers use it in turn, and it holds copies.
    """

    memory: Tensor
    of: nn.Parameter | None = None


T = TypeVar("T", bound="Technique")


class Technique(Handle):
    """The handle that every ``enable_*`` returns: a loop calls it at each moment of a step, and ``remove()`` undoes it.

    A loop calls, in this order: :meth:`before_forward` for each micro-batch, :meth:`clip_grad_norm`,
    :meth:`update_weights`, or :meth:`abandon` instead if one of the others failed and the step is to start over;
    :meth:`flush` before any code reads weights or state (an evaluation, for instance), and :meth:`at_rest` around
    code that reads or sets weights by itself, such as saving and loading.
    """

    takes_whole_window: bool = False
    """True if forward takes all micro-batches between two updates at once, as one batch of all their rows."""

    updates_at_once: bool = False
    """True if weights change while backward runs, before it is known whether the step is finite."""

    is_trained: bool = False
    """True if its own weights are the trained ones: it saves and loads them, and stays when a run is done."""

    @property
    def is_updating(self) -> bool:
        """True if an update of weights has begun and not ended: an error in it cannot be undone."""
        return False

    def before_forward(self, input_ids_BT: Tensor, num_label_tokens: int | None) -> dict[str, Any]:
        """Prepare for a forward, in training or evaluation, given the model's inputs.

        Args:
            input_ids_BT: the micro-batch's token ids, still on the host. Rows are padded on the right.
            num_label_tokens: how many of its labels, after the shift, are not -100; None: unknown.

        Returns:
            Further keyword arguments for this forward.
        """
        return {}

    def clip_grad_norm(self, unscale: Unscale) -> Tensor | None:
        """End the window's backward, and return the global norm of the gradients before clipping, 0-d and float32.

        None: the gradients are where autograd leaves them, and the loop has to clip and apply them.
        """
        return None

    def update_weights(self, is_finite: Callable[[], bool]) -> bool:
        """Apply the gradients, or drop them if loss or norm is not finite; False: the loop has to do that.

        Args:
            is_finite: returns whether they are; a call waits for the device.
        """
        return False

    def abandon(self) -> None:
        """Drop the gradients of a window that failed before its update, and all of its copies in progress.

        The device is idle: it has finished all its work.

        Updates deferred since the step before do not belong to the window: those already made stay made, the others
        stay deferred.
        """

    def flush(self) -> None:
        """Make every deferred update, so that weights and state are those after the last step."""

    def at_rest(self) -> AbstractContextManager[None]:
        """Keep every weight where it can be read and set, in a ``with`` block; callers call :meth:`flush` first."""
        return contextlib.nullcontext()

    def save(self, folder: Path, *, writes: bool = True) -> bool:
        """Write the trained weights in place of the model's own; False: the model's own are the trained ones.

        The main process calls it, for a checkpoint and for the finished model alike; if several processes hold parts of
        it, all of them call it, only the main one with ``writes``.
        """
        return False

    def load(self, folder: Path) -> None:
        """Load what :meth:`save` wrote."""

    def metrics(self) -> dict[str, float]:
        """Return values of the last step to record, by name; may wait for the device."""
        return {}

    def kernels(self) -> dict[str, str]:
        """Return what was chosen on this machine, by recipe key, if another choice would round differently.

        A checkpoint keeps it: a resumed run has to choose the same.
        """
        return {}

    def weights_in_slices(self) -> Iterable[nn.Parameter]:
        """Return weights whose gradients come in slices, if they have any: none ever exists as a whole."""
        return ()

    def weight_memory(self) -> Iterable[WeightMemory]:
        """Return memory whose owner a trace of memory cannot tell."""
        return ()


class Techniques(Technique):
    """All enabled techniques, from the inside out; undoing, flushing and putting at rest go from the outside in.

    Args:
        *techniques: in that order; at most one takes the gradients, and at most one has the trained weights.
    """

    def __init__(self, *techniques: Technique) -> None:
        super().__init__()
        self._techniques: tuple[Technique, ...] = ()
        for technique in techniques:
            self.add(technique)

    def __iter__(self) -> Iterator[Technique]:
        return iter(self._techniques)

    def __reversed__(self) -> Iterator[Technique]:
        return reversed(self._techniques)

    def add(self, technique: Technique) -> None:
        """Add a technique that was enabled later, as the outermost."""
        self._techniques += (technique,)
        self.undo_first(technique.remove)
        self.takes_whole_window |= technique.takes_whole_window
        self.updates_at_once |= technique.updates_at_once
        self.is_trained |= technique.is_trained

    @property
    def is_updating(self) -> bool:
        """True if any technique is updating weights."""
        return any(technique.is_updating for technique in self)

    def find(self, kind: type[T]) -> T | None:
        """Return the technique of a kind; None if it is not enabled."""
        return next((technique for technique in self if isinstance(technique, kind)), None)

    def before_forward(self, input_ids_BT: Tensor, num_label_tokens: int | None) -> dict[str, Any]:
        """Return the further arguments of all techniques."""
        arguments: dict[str, Any] = {}
        for technique in self:
            arguments |= technique.before_forward(input_ids_BT, num_label_tokens)
        return arguments

    def clip_grad_norm(self, unscale: Unscale) -> Tensor | None:
        """Call all techniques; return the norm from the one that takes the gradients, if any does."""
        norms = [technique.clip_grad_norm(unscale) for technique in self]
        return next((norm for norm in norms if norm is not None), None)

    def update_weights(self, is_finite: Callable[[], bool]) -> bool:
        """Call all techniques; True if one takes the gradients."""
        answers = [technique.update_weights(is_finite) for technique in self]
        return any(answers)

    def abandon(self) -> None:
        """Abandon the window in all techniques."""
        for technique in reversed(self):
            technique.abandon()

    def flush(self) -> None:
        """Flush all: a layer's update waits for its visit, and the state that it changes for its copy back."""
        for technique in reversed(self):
            technique.flush()

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        """Flush all techniques, and put them at rest."""
        self.flush()
        with contextlib.ExitStack() as resting:
            for technique in reversed(self):
                resting.enter_context(technique.at_rest())
            yield

    def save(self, folder: Path, *, writes: bool = True) -> bool:
        """Call all techniques; True if one of them has the trained weights."""
        answers = [technique.save(folder, writes=writes) for technique in self]
        return any(answers)

    def load(self, folder: Path) -> None:
        """Load all techniques; only one with the trained weights reads files."""
        for technique in self:
            technique.load(folder)

    def metrics(self) -> dict[str, float]:
        """Return the values of all techniques."""
        return {name: value for technique in self for name, value in technique.metrics().items()}

    def kernels(self) -> dict[str, str]:
        """Return the choices of all techniques."""
        return {key: choice for technique in self for key, choice in technique.kernels().items()}

    def weights_in_slices(self) -> Iterator[nn.Parameter]:
        """Yield the weights of all techniques."""
        for technique in self:
            yield from technique.weights_in_slices()

    def weight_memory(self) -> Iterator[WeightMemory]:
        """Yield the memory of all techniques."""
        for technique in self:
            yield from technique.weight_memory()
