from __future__ import annotations

import dataclasses

import pytest

from lowmem_ft.foundation.catalog.gpu_catalog import load_gpus
from lowmem_ft.foundation.catalog.gpu_spec import Gpu, Price
from lowmem_ft.foundation.memory.memory_estimate import BudgetVerdict, DeviceLimit
from lowmem_ft.foundation.units import GIB
from lowmem_ft.reports.gpu_table import by_cost, gpu_table


def make_gpu(name: str, gib: int, usd_per_hour: float | None) -> Gpu:
    prices = (
        () if usd_per_hour is None else (Price(provider="x", usd_per_hour=usd_per_hour, date="", source=""),)
    )
    return dataclasses.replace(
        load_gpus()["rtx-4090"],
        name=name,
        memory_bytes=gib * GIB,
        prices=prices,
    )


GPUS = {
    gpu.name: gpu
    for gpu in (
        make_gpu("dear-2gb", 2, 3.6),
        make_gpu("unpriced-8gb", 8, None),
        make_gpu("rtx-pro-6000-blackwell", 4, 0.36),
        make_gpu("unpriced-1gb", 1, None),
        make_gpu("old", 4, 0.1),
    )
}


@pytest.fixture
def estimates(estimate):
    """One for each GPU but the old one; 1 GiB is too little."""
    return [
        dataclasses.replace(
            estimate,
            gpu=DeviceLimit(name=gpu.name, memory_bytes=gpu.memory_bytes),
            budget=BudgetVerdict(device_bytes=gpu.memory_bytes, host_bytes=None),
            fits=gpu.memory_bytes > estimate.process_peak_bytes,
        )
        for gpu in GPUS.values()
        if gpu.name != "old"
    ]


def test_the_cheapest_hour_comes_first_and_unpriced_gpus_last_by_memory(estimates):
    names = [estimate.gpu.name for estimate in by_cost(estimates, GPUS)]
    assert names == ["rtx-pro-6000-blackwell", "dear-2gb", "unpriced-1gb", "unpriced-8gb"]


def test_a_gpu_whose_limit_is_within_the_range_may_not_do(estimates, as_text):
    open_ones = [dataclasses.replace(estimate, fits_at_low_end=True) for estimate in estimates]
    text = as_text(gpu_table(open_ones, GPUS, {}))
    assert "fits on 3 of 4 GPUs, and may not fit on 1 more" in text
    (row,) = (line for line in text.splitlines() if line.startswith("unpriced-1gb"))
    assert "may not fit," in row
    assert "may not fit" not in as_text(gpu_table(estimates, GPUS, {}))


def test_each_gpu_has_a_line_with_verdict_speed_and_price(estimates, as_text):
    lines = as_text(gpu_table(estimates, GPUS, {})).splitlines()
    assert max(map(len, lines)) <= 80
    row = {line.split()[0]: line.split() for line in lines if line}
    assert row["dear-2gb"][3] == "free"
    assert row["dear-2gb"][-5:] == [
        "2.00",
        "3.00",
        "2,000",
        "3.60",
        "0.500",
    ]  # of its memory, on the host, ...
    assert row["unpriced-8gb"][-3:] == ["2,000", "-", "-"]
    assert row["unpriced-1gb"][3] == "over"
    assert row["unpriced-1gb"][-3:] == ["-", "-", "-"]
    assert lines[0] == "two-layers fits on 3 of 4 GPUs"


def test_tight_gpus_are_told_from_those_with_room(estimates, as_text):
    limit = round(estimates[0].process_peak_bytes / 0.97)
    estimates[0] = dataclasses.replace(
        estimates[0], budget=BudgetVerdict(device_bytes=limit, host_bytes=None)
    )
    lines = as_text(gpu_table(estimates, GPUS, {})).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "two-layers fits on 3 of 4 GPUs, on 1 of them tightly"
    assert [line.split()[3] for line in lines if line.startswith("dear-2gb")] == ["tight"]


def test_gpus_that_cannot_run_it_are_listed_with_the_rule_once(estimates, as_text):
    errors = {name: f"Reading is hard, got {name}. Write." for name in ("old", "older")}
    text = as_text(gpu_table(estimates, GPUS, {**errors, "odd": "It is odd."}))
    assert "two-layers fits on 3 of 7 GPUs" in text
    assert "Cannot run it: old, older. Reading is hard.\n" in text
    assert "Cannot run it: odd. It is odd.\n" in text


def test_what_was_chosen_for_all_gpus_stands_above_the_table(estimates, as_text):
    for index, estimate in enumerate(estimates):
        estimates[index] = dataclasses.replace(estimate, choices=("batch: 1", f"attention: {index}"))
    lines = as_text(gpu_table(estimates, GPUS, {})).splitlines()
    assert lines[2:4] == ["batch: 1", ""]
    assert not any("attention" in line for line in lines)
