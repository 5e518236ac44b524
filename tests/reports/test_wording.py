from __future__ import annotations

import dataclasses

import pytest

from lowmem_ft.memory.category import CATEGORIES, PHASES
from lowmem_ft.memory.estimate import BudgetVerdict
from lowmem_ft.reports.wording import CATEGORY_WORDS, PHASE_WORDS, module_words, verdict
from lowmem_ft.units import GIB, MIB


@pytest.mark.parametrize(
    "module,words",
    [
        ("", "outside any module"),
        ("lm_head", "lm_head"),
        ("model.layers.31", "layer 31"),
        ("model.layers.3.mlp.down_proj", "mlp.down_proj of layer 3"),
        ("transformer.h.0.attn", "attn of layer 0"),
        ("model.layers.2.mlp.experts.5", "mlp.experts.5 of layer 2"),
    ],
)
def test_modules_are_named_by_layer(module, words):
    assert module_words(module) == words


def test_every_category_and_phase_has_words():
    assert set(CATEGORY_WORDS) == set(CATEGORIES)
    assert set(PHASE_WORDS) == set(PHASES)


def test_the_verdict_says_by_how_much(estimate, too_big):
    assert estimate.headroom_bytes is not None
    spare = estimate.headroom_bytes / MIB
    assert verdict(estimate) == f"fits on small-gpu with {spare:.0f} MiB to spare"
    missing = -too_big.headroom_bytes / MIB
    assert verdict(too_big) == f"does not fit on tiny-gpu: {missing:.0f} MiB over"


def test_the_verdict_names_a_budget_below_the_gpus_memory(too_big):
    budget = BudgetVerdict(device_bytes=512 * MIB, host_bytes=2 * GIB)
    over = verdict(dataclasses.replace(too_big, budget=budget))
    assert over.startswith("does not fit in 512 MiB of tiny-gpu: ")
    assert over.endswith(" over, host 1.00 GiB over")


def test_a_run_that_exceeds_only_the_host_says_so(estimate):
    budget = BudgetVerdict(device_bytes=2 * GIB, host_bytes=GIB)
    refused = dataclasses.replace(estimate, budget=budget, fits=False)
    assert verdict(refused) == "does not fit on small-gpu: host 2.00 GiB over"


def test_without_a_limit_there_is_nothing_to_spare(estimate):
    unlimited = dataclasses.replace(estimate, budget=BudgetVerdict(device_bytes=None, host_bytes=None))
    assert verdict(unlimited) == "fits on small-gpu"
