"""Steps whose loss is not finite, as a bad example makes them."""

from __future__ import annotations

import math
from collections.abc import Collection

import pytest

from lowmem_ft.training.run import loop


def poison_the_loss(monkeypatch: pytest.MonkeyPatch, steps: Collection[int]) -> None:
    """Make the loss of some steps NaN."""
    step = loop.Retries.train_step
    count = 0

    def poisoned(retries, window):
        nonlocal count
        count += 1
        if count not in steps:
            return step(retries, window)
        model = retries.session.unwrapped_model
        forward = model.forward

        def broken(*args, **kwargs):
            outputs = forward(*args, **kwargs)
            outputs.loss = outputs.loss * math.nan
            return outputs

        with monkeypatch.context() as patch:
            patch.setattr(model, "forward", broken)
            return step(retries, window)

    monkeypatch.setattr(loop.Retries, "train_step", poisoned)
