from __future__ import annotations

import dataclasses

import pytest

from lowmem_ft.foundation.memory.category import CATEGORIES, PHASES
from lowmem_ft.foundation.memory.memory_estimate import BudgetVerdict, DeviceLimit, ProcessRange
from lowmem_ft.foundation.memory.uncertainty import Uncertainty
from lowmem_ft.foundation.units import GIB, MIB
from lowmem_ft.reports.estimate_words import CATEGORY_WORDS, PHASE_WORDS, caution, module_words, verdict


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
    assert verdict(estimate) == (
        f"fits on small-gpu with {spare:.0f} MiB to spare, and needs 3.00 GiB of host memory"
    )
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
    assert verdict(unlimited) == "fits on small-gpu, and needs 3.00 GiB of host memory"


def test_what_lies_on_disk_is_needed_too(estimate):
    on_disk = verdict(dataclasses.replace(estimate, disk_peak_bytes=40 * GIB))
    assert on_disk.endswith(", and needs 3.00 GiB of host memory and 40.0 GiB of disk")


def test_of_a_processor_host_memory_is_all_there_is(estimate):
    on_cpu = dataclasses.replace(estimate, gpu=DeviceLimit(name="cpu (x86_64)", memory_bytes=0))
    assert "host" not in verdict(on_cpu)


def test_a_tight_verdict_says_so_why_and_what_to_do(estimate):
    assert caution(estimate) == ""
    limit = round(estimate.process_peak_bytes / 0.97)
    tight = dataclasses.replace(estimate, budget=BudgetVerdict(device_bytes=limit, host_bytes=None))
    assert verdict(tight).startswith("fits tightly in ")
    assert caution(tight).startswith(
        "Tight: 3.0% of the device's memory is left, and estimates have been off by up to 6%."
    )
    host = dataclasses.replace(
        estimate, budget=BudgetVerdict(device_bytes=2 * GIB, host_bytes=round(3 * GIB / 0.98))
    )
    assert caution(host).startswith("Tight: 2.0% of budget.host is left")


def test_what_others_hold_stands_in_the_verdict(estimate):
    gpu = dataclasses.replace(estimate.gpu, held_by_others_bytes=512 * MIB)
    budget = BudgetVerdict(device_bytes=1536 * MIB, host_bytes=None)
    assert " to spare in addition to 512 MiB that others hold, and needs" in verdict(
        dataclasses.replace(estimate, gpu=gpu, budget=budget)
    )
    refused = verdict(dataclasses.replace(estimate, gpu=gpu, budget=budget, fits=False))
    assert refused.endswith(" in addition to 512 MiB that others hold")


def test_where_the_upper_end_alone_is_too_much_that_is_said(estimate):
    unsure = Uncertainty(reserved_share=0.01, outside_share=0.1)
    high = ProcessRange(low_bytes=0, high_bytes=2 * GIB + MIB, uncertainty=unsure)
    refused = dataclasses.replace(estimate, process_range=high, fits=False)
    assert verdict(refused) == "does not fit on small-gpu: up to 1.00 MiB over"
    straddles = dataclasses.replace(refused, fits_at_low_end=True)
    assert verdict(straddles) == "may not fit on small-gpu: up to 1.00 MiB over"
    assert caution(refused) == ""
    assert caution(straddles).startswith("The limit is within the estimate's range, 0 B to 2.00 GiB.")
