"""Errors that cross from one process to another, as those of a worker or of a process pool do."""

from __future__ import annotations

import pickle
import signal
from pathlib import Path

import pytest

from lowmem_ft.foundation.errors import (
    DoesNotFitError,
    Interrupted,
    MissingPackageError,
    RecipeError,
    UserError,
)
from lowmem_ft.foundation.upstream.patches import UpstreamChangedError

MADE_OTHERWISE = {
    MissingPackageError: MissingPackageError("model.quantization=nf4", "bitsandbytes"),
    UpstreamChangedError: UpstreamChangedError("torch._C._gone"),
}


@pytest.mark.parametrize("kind", [UserError, RecipeError, DoesNotFitError, *MADE_OTHERWISE])
def test_a_users_error_says_the_same_in_another_process(kind):
    error = MADE_OTHERWISE.get(kind) or kind("one problem", "and another")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (copy.problems, str(copy), copy.exit_code) == (error.problems, str(error), error.exit_code)


@pytest.mark.parametrize(
    "saved", [{"checkpoint": Path("runs/a/checkpoint-3")}, {"model_folder": Path("runs/a/model")}]
)
def test_an_interruption_says_the_same_in_another_process(saved):
    stop = Interrupted(signal.SIGTERM, **saved)
    copy = pickle.loads(pickle.dumps(stop))
    assert (str(copy), copy.exit_code) == (str(stop), 143)
    assert (copy.checkpoint, copy.model_folder) == (stop.checkpoint, stop.model_folder)


def test_an_interrupted_worker_has_not_ended_well():
    """torch.multiprocessing takes a KeyboardInterrupt of a worker for its good end."""
    assert not issubclass(Interrupted, (KeyboardInterrupt, Exception))
