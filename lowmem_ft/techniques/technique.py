"""A technique that is on, and all that a training loop, whose ever it is, has to ask of it.

What changes the model, its optimizer or autograd by itself needs none of this. The rest are *moments* of a step that
:class:`Technique` lists; they do nothing unless a technique says otherwise. ``training/step.py`` and
``training/session.py`` pass each on to :class:`Techniques`, the ordered list of what is on; so can any other loop.
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
"""Divides a tensor of values that come from gradients by the fp16 loss scale, in place; notes what is not finite."""


@dataclass(frozen=True)
class WeightMemory:
    """Memory that holds weights and is no parameter's own storage, so that nobody can see whose it is.

    Args:
        memory: a tensor of bytes, on the device or the host.
        of: a parameter of the layer that it belongs to; None: several layers use it in turn, and it holds copies.
    """

    memory: Tensor
    of: nn.Parameter | None = None


T = TypeVar("T", bound="Technique")


class Technique(Handle):
    """What every ``enable_*`` returns: ``remove()`` undoes it, and between the two a loop tells it where a step stands.

    A loop calls, in this order: :meth:`before_forward` for each micro-batch, :meth:`clip_grad_norm`,
    :meth:`update_weights`, or :meth:`abandon` instead if one of the others failed and the step is to start over;
    :meth:`flush` before anyone reads weights or state (an evaluation, for instance), and :meth:`at_rest` around
    whatever reads or sets weights by itself, as saving and loading do.
    """

    takes_whole_window: bool = False
    """Whether forward takes all micro-batches between two updates at once, as one batch of all their rows."""

    updates_at_once: bool = False
    """Whether weights change while backward runs, before it is known whether the step is finite."""

    is_trained: bool = False
    """Whether its own weights are what is trained: it saves and loads them, and stays when a run is done."""

    @property
    def is_updating(self) -> bool:
        """Whether an update of weights has begun and not ended: an error in it cannot be taken back."""
        return False

    def before_forward(self, input_ids_BT: Tensor, num_label_tokens: int | None) -> dict[str, Any]:
        """Called before each forward, in training and in evaluation, with what the model is about to get.

        Args:
            input_ids_BT: the micro-batch's token ids, on the host still. Rows are padded on the right.
            num_label_tokens: how many of its labels, after the shift, are not -100; None: that is not known.

        Returns:
            Further keyword arguments for this forward.
        """
        return {}

    def clip_grad_norm(self, unscale: Unscale) -> Tensor | None:
        """End the window's backward: the global norm of the gradients before clipping, 0-d and float32.

        None: the gradients are where autograd leaves them, and are the loop's to clip and to apply.
        """
        return None

    def update_weights(self, *, finite: bool) -> bool:
        """Apply the gradients, or forget them if loss or norm is not finite; False: that is the loop's to do."""
        return False

    def abandon(self) -> None:
        """The window failed before its update: forget its gradients, and whatever of it was on its way somewhere.

        The device is at rest: it has done all that it was given.

        Updates that wait since the step before are not the window's: those that it has made stay made, the others wait.
        """

    def flush(self) -> None:
        """Make every update that waits, so that weights and state are those after the last step."""

    def at_rest(self) -> AbstractContextManager[None]:
        """In a ``with`` block, every weight where it can be read and set; :meth:`flush` goes before."""
        return contextlib.nullcontext()

    def save(self, folder: Path, *, writes: bool = True) -> bool:
        """Write what is trained in place of the model's own weights; False: those are what is trained.

        Called for a checkpoint and for the finished model alike, by the main process; where several hold parts of it,
        by all of them, the main one alone with ``writes``.
        """
        return False

    def load(self, folder: Path) -> None:
        """Take what :meth:`save` wrote."""

    def metrics(self) -> dict[str, float]:
        """What to write down of the last step, by name; may wait for the device."""
        return {}

    def weight_memory(self) -> Iterable[WeightMemory]:
        """What a trace of memory cannot tell the owner of."""
        return ()


class Techniques(Technique):
    """All that is on, from the inside out; what is undone, flushed or put at rest is so from the outside in.

    Args:
        *techniques: in that order; at most one takes the gradients, and at most one is what is trained.
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
        """Let a technique that was switched on later be asked, too, as the outermost."""
        self._techniques += (technique,)
        self.undo_first(technique.remove)
        self.takes_whole_window |= technique.takes_whole_window
        self.updates_at_once |= technique.updates_at_once
        self.is_trained |= technique.is_trained

    @property
    def is_updating(self) -> bool:
        """Whether one of them is."""
        return any(technique.is_updating for technique in self)

    def find(self, kind: type[T]) -> T | None:
        """The technique of a kind; None if it is not on."""
        return next((technique for technique in self if isinstance(technique, kind)), None)

    def before_forward(self, input_ids_BT: Tensor, num_label_tokens: int | None) -> dict[str, Any]:
        """The further arguments of all."""
        arguments: dict[str, Any] = {}
        for technique in self:
            arguments |= technique.before_forward(input_ids_BT, num_label_tokens)
        return arguments

    def clip_grad_norm(self, unscale: Unscale) -> Tensor | None:
        """By the one that takes the gradients, if any does; all are told."""
        norms = [technique.clip_grad_norm(unscale) for technique in self]
        return next((norm for norm in norms if norm is not None), None)

    def update_weights(self, *, finite: bool) -> bool:
        """By the one that takes the gradients, if any does; all are told."""
        answers = [technique.update_weights(finite=finite) for technique in self]
        return any(answers)

    def abandon(self) -> None:
        """All of them."""
        for technique in reversed(self):
            technique.abandon()

    def flush(self) -> None:
        """All of them: a layer's update waits for its visit, the state that it changes for its way back."""
        for technique in reversed(self):
            technique.flush()

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        """All of them, flushed."""
        self.flush()
        with contextlib.ExitStack() as resting:
            for technique in reversed(self):
                resting.enter_context(technique.at_rest())
            yield

    def save(self, folder: Path, *, writes: bool = True) -> bool:
        """By the one that is what is trained, if any is; all are told, as they are when it is loaded."""
        answers = [technique.save(folder, writes=writes) for technique in self]
        return any(answers)

    def load(self, folder: Path) -> None:
        """By the one that is what is trained, if any is."""
        for technique in self:
            technique.load(folder)

    def metrics(self) -> dict[str, float]:
        """Those of all."""
        return {name: value for technique in self for name, value in technique.metrics().items()}

    def weight_memory(self) -> Iterator[WeightMemory]:
        """That of all."""
        for technique in self:
            yield from technique.weight_memory()
