"""The end of a trainer's processes together, where one of them fails or is killed.

A launcher ends the others, too: silently, or once each has printed what its own collective met.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lowmem_ft.foundation.errors import OtherProcessError
from lowmem_ft.techniques.modules.patching import call_around
from lowmem_ft.training.processes.error_propagation import ending_together

_RESUME = {"training.resume_from_checkpoint=auto": "trainer.train(resume_from_checkpoint=True)"}
"""Words by which our own loop is resumed, and those for a trainer."""


def end_together(trainer: Any) -> Iterator[Callable[[], object]]:
    """Let an error in one process end the training of all, with its reason, and yield the call that undoes this.

    Args:
        trainer: a trainer of any kind; with several processes, call it in each.
    """
    if trainer.accelerator.num_processes > 1:
        yield call_around(trainer, "train", _train_together)


def _train_together(train: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        with ending_together():
            return train(*args, **kwargs)
    except OtherProcessError as error:
        told = str(error)
        for ours, theirs in _RESUME.items():
            told = told.replace(ours, theirs)
        raise OtherProcessError(told) from error.__cause__
