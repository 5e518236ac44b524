"""The promise of a budget: what was planned for it runs inside it, every tensor counted.

On a CPU, where every byte can be counted. A budget is made of what the process takes at the upper end of its range and
a share of what the recipe's own tensors would take; tensors may have no more than that share. The first of them that
does not fit ends the run, as on a device of that size.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from measuring.families import FAMILIES, VOCABULARY, write_families
from measuring.real_run import run_for_real
from sweeps import few_quick

from lowmem_ft.foundation.budget import Budget
from lowmem_ft.foundation.memory.uncertainty import CPU_PROCESS_SHARE, RESERVED_SHARE
from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker
from lowmem_ft.planning.estimator import estimate_memory
from lowmem_ft.planning.estimator.run_host_memory import process_bytes_on_cpu
from lowmem_ft.planning.planner import plan
from lowmem_ft.planning.planner.search import estimated_search
from lowmem_ft.recipe import load_recipe

NUM_RUNS = 22
QUICK = (18,)
"""What `make test` tries."""


ALLOWED_ERROR = 0.005
"""Of what tensors take against the estimate, as in ``tests/planning/estimator/test_against_real_steps.py``."""


PROCESS_HIGH_BYTES = round(process_bytes_on_cpu(VOCABULARY) * (1 + CPU_PROCESS_SHARE))


class BeyondBudgetError(Exception):
    """A tensor that does not fit."""


class StrictTracker(StorageTracker):
    """Raises as soon as tensors take more than they may, wherever the program is."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()
        self._limit_bytes = limit_bytes

    def _measure(self, storage: torch.UntypedStorage) -> None:
        super()._measure(storage)
        if self.peak_bytes > self._limit_bytes:
            raise BeyondBudgetError(f"{self.peak_bytes} bytes of {self._limit_bytes}")


@pytest.fixture(scope="module")
def families(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    write_families(folder)
    return folder


def some_recipe(draw: random.Random, families: Path) -> tuple[list[str], float]:
    """Settings of a run before its plan, and how much of what its tensors take they may have."""
    allow = draw.choice([[], [], ["lora"], ["shorter_rows", "plain_bf16"]])
    settings: dict[str, Any] = {
        "model": families / draw.choice(sorted(FAMILIES)),
        "model.weights": "random",
        "data.max_length": draw.choice([64, 96, 128]),
        "data.eval_size": draw.choice(["null", 4]),
        "training.per_device_train_batch_size": draw.choice([1, 2, 4]),
        "training.gradient_accumulation_steps": draw.choice([1, 2, 3]),
        "training.max_grad_norm": draw.choice(["null", 1.0]),
        "optimizer.name": draw.choice(["adamw", "lion"]),
        "checkpointing.mode": draw.choice(["none", "full"]),
        "plan.allow": f"[{','.join(allow)}]",
    }
    return [f"{key}={value}" for key, value in settings.items()], draw.choice([0.55, 0.7, 0.85, 1.0])


@pytest.mark.parametrize("seed", few_quick(range(NUM_RUNS), QUICK))
def test_what_was_planned_for_a_budget_stays_within_it(seed, families, monkeypatch):
    # What a plan promises does not depend on how many others it has seen.
    monkeypatch.setattr(estimated_search, "MAX_EFFORT", 5)
    settings, share = some_recipe(random.Random(seed), families)
    recipe = load_recipe(None, settings)
    own_bytes = estimate_memory(recipe, "cpu").allocated_peak_bytes
    limit_bytes = round(share * own_bytes * (1 + RESERVED_SHARE)) + 1
    result = plan(recipe, Budget(device=f"{PROCESS_HIGH_BYTES + limit_bytes}B"), "cpu")
    if not result.fits:
        # Whoever adds what the plan says is missing has a plan.
        limit_bytes += result.missing_device_bytes
        result = plan(recipe, Budget(device=f"{PROCESS_HIGH_BYTES + limit_bytes}B"), "cpu")
    assert result.fits, settings
    peaks = run_for_real(result.recipe, tracker=StrictTracker(limit_bytes))
    measured_bytes = max(peaks.allocated.values())
    assert measured_bytes <= limit_bytes
    assert measured_bytes == pytest.approx(result.estimate.allocated_peak_bytes, rel=ALLOWED_ERROR)


def test_a_run_that_was_not_planned_is_beyond_it(families):
    recipe = load_recipe(None, some_recipe(random.Random(0), families)[0])
    limit_bytes = round(0.9 * estimate_memory(recipe, "cpu").allocated_peak_bytes)
    with pytest.raises(BeyondBudgetError):
        run_for_real(recipe, tracker=StrictTracker(limit_bytes))
