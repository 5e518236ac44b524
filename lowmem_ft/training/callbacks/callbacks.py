"""The callbacks of a run: objects with any of ``on_step``, ``on_evaluate`` and ``on_save``, and early stopping."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass

from lowmem_ft.foundation.errors import UserError, raise_problems
from lowmem_ft.recipe.training_config import TrainingConfig
from lowmem_ft.training.callbacks.events import EvaluationEvent, SaveEvent, StepEvent, Stop
from lowmem_ft.training.folder.checkpoint_folders import Progress
from lowmem_ft.training.processes.ranks import Ranks

Event = StepEvent | EvaluationEvent | SaveEvent

CONTINUE, STOP, FAIL = 0, 1, 2

_METHODS = {StepEvent: "on_step", EvaluationEvent: "on_evaluate", SaveEvent: "on_save"}


class Callbacks:
    """All callbacks of a run, called only in the main process, one after the other.

    The first that returns a :class:`Stop`, or raises an exception, decides how the run ends. The loop tells the other
    processes of the :attr:`wish`, and ends the run at the end of its step. After an exception no callback is called any
    more.

    Args:
        callbacks: the objects.
        ranks: ranks of the run.
    """

    def __init__(self, callbacks: Iterable[object], ranks: Ranks) -> None:
        self._callbacks, self._ranks = tuple(callbacks), ranks
        self.stop: Stop | None = None
        self._error: Exception | None = None

    def tell(self, event: Event) -> None:
        """Call the method of an event's type, of each object that has it."""
        if not self._ranks.is_main:
            return
        name = _METHODS[type(event)]
        for callback in self._callbacks:
            method = getattr(callback, name, None)
            if method is None or self._error is not None:
                continue
            try:
                self.ask(_checked(method(event), callback, name))
            except Exception as error:
                self._error = error

    def ask(self, stop: Stop | None) -> None:
        """Note a wish to stop, unless there is one already."""
        self.stop = self.stop or stop

    @property
    def wish(self) -> int:
        """The wish of this process's callbacks: :data:`CONTINUE`, :data:`STOP`, or after an exception :data:`FAIL`."""
        return FAIL if self._error is not None else CONTINUE if self.stop is None else STOP

    def raise_error(self) -> None:
        """Raise the exception of a callback, with its own traceback; the processes without one wait until it ends them.

        Every process calls this.
        """
        if self._error is not None:
            raise self._error
        self._ranks.wait_for_everyone()


def callbacks_of_run(
    callbacks: Iterable[object], config: TrainingConfig, progress: Progress, ranks: Ranks
) -> Callbacks:
    """Return a caller's callbacks, and early stopping after them if a recipe asks for it.

    Args:
        callbacks: the caller's.
        config: says whether a run stops early.
        progress: progress of the run, which may resume where it was to stop.
        ranks: ranks of the run.
    """
    if config.early_stopping_patience is None:
        return Callbacks(callbacks, ranks)
    early_stopping = _EarlyStopping(config.early_stopping_patience, config.early_stopping_threshold)
    all_of_run = Callbacks((*callbacks, early_stopping), ranks)
    all_of_run.ask(early_stopping.verdict(progress.evaluations_without_gain))
    return all_of_run


def _checked(answer: object, callback: object, name: str) -> Stop | None:
    """Return a callback's answer.

    Raises:
        UserError: if it is neither None nor a :class:`Stop`.
    """
    if answer is None:
        return None
    if isinstance(answer, Stop) and isinstance(answer.reason, str) and answer.reason.strip():
        return answer
    if inspect.iscoroutine(answer):
        answer.close()  # else Python warns, later and elsewhere, that it was never awaited
    raise UserError(
        f"{type(callback).__name__}.{name} must return None, or lowmem_ft.Stop(reason) with a sentence, which ends the "
        f"run; got {answer!r}."
    )


def check_callbacks(callbacks: object) -> None:
    """Check, before anything is loaded, that each object has a method that will be called.

    Raises:
        UserError: if they are in no list, one has none of the methods, or it has another whose name begins with
            ``on_``, which nothing would call.
    """
    if not isinstance(callbacks, (list, tuple)):  # of a generator nothing would be left after this check
        raise UserError(
            f"callbacks is a list of objects, got a value of type {type(callbacks).__name__}. Write callbacks=[...]."
        )
    raise_problems(problem for callback in callbacks if (problem := _problem(callback)))


def _problem(callback: object) -> str:
    methods = ", ".join(_METHODS.values())
    found = sorted(name for name in dir(callback) if name.startswith("on_"))
    name = callback.__name__ if isinstance(callback, type) else type(callback).__name__
    if isinstance(callback, type):
        return f"A callback must be an object, got the class {name}. Pass {name}()."
    if unknown := [name for name in found if name not in _METHODS.values()]:
        return (
            f"A callback has any of the methods {methods}; {name} has {', '.join(unknown[:3])}, which no run calls. "
            "Rename or remove that, or wrap a transformers callback in an object of your own."
        )
    if broken := [name for name in found if not callable(getattr(callback, name))]:
        return f"A callback's {broken[0]} must be a method, got another value in {name}. Correct it."
    return "" if found else f"A callback must have one of the methods {methods}; {name} has none of them."


@dataclass(frozen=True)
class _EarlyStopping:
    """Stops a run whose evaluations no longer improve, as ``training/evaluation/best_model.py`` compares them.

    Args:
        patience: ``training.early_stopping_patience``.
        threshold: ``training.early_stopping_threshold``, by which results that count as better have improved.
    """

    patience: int
    threshold: float = 0.0

    def on_evaluate(self, event: EvaluationEvent) -> Stop | None:
        """Ask to stop after ``patience`` evaluations in a row without a gain."""
        return self.verdict(event.evaluations_without_gain)

    def verdict(self, evaluations_without_gain: int) -> Stop | None:
        """Return the same for a count, which a resumed run has from its checkpoint."""
        if evaluations_without_gain < self.patience:
            return None
        by = f" by more than training.early_stopping_threshold={self.threshold:g}" if self.threshold else ""
        return Stop(
            f"The held-out result has not improved{by} for {evaluations_without_gain} evaluations in a row."
        )
