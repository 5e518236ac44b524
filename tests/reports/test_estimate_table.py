from __future__ import annotations

import dataclasses
import io
import re

import pytest
from rich.console import Console

from lowmem_ft.foundation.catalog.gpu_spec import Price
from lowmem_ft.foundation.memory.memory_estimate import BudgetVerdict, ProcessRange
from lowmem_ft.foundation.memory.uncertainty import Uncertainty
from lowmem_ft.foundation.units import GIB, MIB
from lowmem_ft.planning.estimator.changes import Change, Changes
from lowmem_ft.recipe.space.remediations import Remediation
from lowmem_ft.reports.estimate_table import (
    changes_table,
    estimate_table,
    format_dollars,
    price_per_million_tokens,
)
from lowmem_ft.reports.plots.memory_figure import memory_figure

PRICE = Price(provider="somebody", usd_per_hour=0.72, date="2026-10-01", source="https://example.org")


def bar_lengths(text: str) -> dict[str, int]:
    """Full characters of each bar, by the words before it."""
    rows = (re.match(r"  (\S.*?) +(█*)\S* +[\d.]+ \w+ +[\d.]+%", line) for line in text.splitlines())
    return {row[1].strip(): len(row[2]) for row in rows if row}


def test_the_verdict_comes_first(estimate, too_big, as_text):
    assert as_text(estimate_table(estimate)).startswith("two-layers fits on small-gpu with ")
    assert as_text(estimate_table(too_big)).startswith("two-layers does not fit on tiny-gpu: ")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_bars_share_the_gpus_memory(estimate, as_text, width):
    lengths = bar_lengths(as_text(estimate_table(estimate), width))
    assert list(lengths) == [
        "parameters",
        "optimizer state",
        "gradients",
        "temporaries",
        "cached, not in use",
        "context, libraries",
        "free",
    ]
    assert lengths["optimizer state"] == pytest.approx(2 * lengths["parameters"], abs=1)
    whole_bar = sum(lengths.values())
    share = lengths["optimizer state"] / whole_bar
    assert share == pytest.approx(400 / 2048, abs=0.1)  # each bar is cut to whole characters


def test_what_is_missing_is_shown_where_it_does_not_fit(too_big, as_text):
    text = as_text(estimate_table(too_big))
    lengths = bar_lengths(text)
    assert "free" not in lengths
    assert lengths["missing"] > 0
    longest = max(len(line.rstrip()) for line in text.splitlines())
    assert longest <= 80


def test_without_a_known_limit_the_bars_share_what_is_needed(estimate, as_text):
    on_cpu = dataclasses.replace(estimate, gpu=dataclasses.replace(estimate.gpu, name="cpu", memory_bytes=0))
    text = as_text(estimate_table(on_cpu))
    lengths = bar_lengths(text)
    assert "free" not in lengths
    assert "missing" not in lengths
    shares = [float(share) for share in re.findall(r"([\d.]+)% *$", text, re.M)]
    assert sum(shares) == pytest.approx(100, abs=0.05 * len(shares))


def test_the_report_says_where_how_fast_and_at_what_price(estimate, as_text):
    text = " ".join(as_text(estimate_table(estimate, PRICE)).split())
    assert "peak in backward, mlp of layer 1" in text
    assert "by phase load 200 MiB, forward 700 MiB, backward" in text
    assert "host 3.00 GiB resident at the peak" in text
    assert "0.5 s for 1,000 tokens: 2,000 tokens/s, bound by memory bandwidth" in text
    assert "$0.10 per 1M tokens at $0.72 an hour (somebody, 2026-10-01)" in text
    assert "attention: math kernel (the mask is not causal)" in text
    assert "not modelled memory that other processes hold" in text
    assert "traced in 3.1 s, torch 2.13.0" in text


def test_seconds_have_a_range_in_table_and_json_where_it_is_known(estimate, as_text):
    step = dataclasses.replace(estimate.step, seconds_share=0.25)
    known = dataclasses.replace(estimate, step=step)
    assert "0.5 s (0.4 to 0.62) for 1,000 tokens" in " ".join(as_text(estimate_table(known)).split())
    in_json = known.to_json()["step"]
    assert in_json["low_seconds"] == pytest.approx(0.4)
    assert in_json["high_seconds"] == pytest.approx(0.625)
    assert estimate.to_json()["step"]["low_seconds"] == estimate.to_json()["step"]["seconds"]


def test_the_range_of_the_process_stands_beside_it(estimate, as_text):
    unsure = Uncertainty(reserved_share=0.01, outside_share=0.1)
    around = ProcessRange(low_bytes=1000 * MIB, high_bytes=1536 * MIB, uncertainty=unsure)
    text = as_text(estimate_table(dataclasses.replace(estimate, process_range=around)))
    assert re.search(r"process [\d.]+ \w+ \(1000 MiB to 1.50 GiB\)", text)
    around = dataclasses.replace(around, low_bytes=1229 * MIB)
    text = as_text(estimate_table(dataclasses.replace(estimate, process_range=around)))
    assert "(1.20 to 1.50 GiB)" in text


def test_a_context_that_nobody_has_read_is_said_to_be_estimated(estimate, as_text):
    gpu = dataclasses.replace(estimate.gpu, context_is_estimate=True)
    lengths = bar_lengths(as_text(estimate_table(dataclasses.replace(estimate, gpu=gpu))))
    assert "context, estimated" in lengths
    assert "context, libraries" not in lengths


def test_paged_state_is_not_called_libraries(estimate, as_text):
    paged = dataclasses.replace(estimate, paged_peak_bytes=100 * MIB)
    assert "context, paged state" in bar_lengths(as_text(estimate_table(paged)))
    assert "context, paged state" in [layer.words for layer in memory_figure(paged).layers]
    assert "context, libraries" in [layer.words for layer in memory_figure(estimate).layers]


def test_what_others_hold_has_a_bar(estimate, as_text):
    gpu = dataclasses.replace(estimate.gpu, held_by_others_bytes=512 * MIB)
    text = as_text(estimate_table(dataclasses.replace(estimate, gpu=gpu)))
    assert bar_lengths(text)["held by others"] > 0
    shares = [float(share) for share in re.findall(r"([\d.]+)% *$", text, re.M)]
    assert sum(shares) == pytest.approx(100, abs=0.05 * len(shares))


def test_where_a_budget_below_the_gpu_decides_the_bars_are_of_the_budget(estimate, as_text):
    gpu = dataclasses.replace(estimate.gpu, held_by_others_bytes=128 * MIB)
    limit = estimate.gpu.memory_bytes - 256 * MIB
    budget = BudgetVerdict(device_bytes=limit, host_bytes=None)
    text = as_text(estimate_table(dataclasses.replace(estimate, gpu=gpu, budget=budget)))
    assert "at the peak, of 1.75 GiB that the budget allows" in text
    assert "held by others" not in bar_lengths(text)
    shares = [float(share) for share in re.findall(r"([\d.]+)% *$", text, re.M)]
    assert sum(shares) == pytest.approx(100, abs=0.05 * len(shares))
    free = re.search(r"free .*?([\d.]+) MiB +([\d.]+)% *$", text, re.M)
    assert float(free[1]) == pytest.approx((limit - estimate.process_peak_bytes) / MIB, abs=1)


def test_of_a_local_path_the_last_two_parts_are_the_name(estimate, as_text):
    path = "/home/somebody/with/a/long/path/to/their/models/on/another/disk/Qwen2.5-7B/checkpoint-500"
    model = dataclasses.replace(estimate.model, name=path)
    text = as_text(estimate_table(dataclasses.replace(estimate, model=model)))
    assert text.startswith("Qwen2.5-7B/checkpoint-500 fits on small-gpu")


def test_a_tight_verdict_warns_below_its_first_line(estimate, as_text):
    limit = round(estimate.process_peak_bytes / 0.97)
    tight = dataclasses.replace(estimate, budget=BudgetVerdict(device_bytes=limit, host_bytes=None))
    text = as_text(estimate_table(tight))
    assert "Tight: 3.0% of the device's memory is left" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80


def test_the_host_is_shown_by_what_it_holds(estimate, as_text):
    parts = {"process": GIB, "gradient": 2 * GIB, "input": MIB}
    text = " ".join(
        as_text(estimate_table(dataclasses.replace(estimate, host_by_part_at_peak=parts))).split()
    )
    assert "resident at the peak pending gradients 2.00 GiB, the process itself 1.00 GiB step" in text


def test_what_lies_on_disk_is_told_from_what_is_resident(estimate, as_text):
    assert "offload.folder" not in as_text(estimate_table(estimate))
    on_disk = dataclasses.replace(estimate, disk_peak_bytes=40 * 2**30)
    text = " ".join(as_text(estimate_table(on_disk)).split())
    assert "host 3.00 GiB resident at the peak; 40.0 GiB on disk, in offload.folder" in text


def test_without_a_clock_or_a_price_there_is_no_cost(estimate, as_text):
    assert "per 1M tokens" not in as_text(estimate_table(estimate))
    without_clock = dataclasses.replace(estimate, step=None)
    assert "tokens" not in as_text(estimate_table(without_clock, PRICE))
    assert price_per_million_tokens(None, PRICE) is None


def test_trained_share_is_said_where_some_parameters_are_frozen(estimate, as_text):
    model = dataclasses.replace(estimate.model, trainable_parameters=524_288)
    text = as_text(estimate_table(dataclasses.replace(estimate, model=model)))
    assert "52,428,800 parameters, 524,288 trained (1.00%)" in text


def test_it_can_be_written_where_only_ascii_can(estimate):
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(file=file, width=80).print(estimate_table(estimate))
    file.flush()
    written = file.buffer.getvalue().decode("ascii")  # pyright: ignore[reportAttributeAccessIssue]
    assert "#####" in written


def make_change(estimate) -> Change:
    return Change(
        way=Remediation(
            settings={"checkpointing.mode": "full", "loss.chunk_tokens": 512}, why="a second forward"
        ),
        estimate=estimate,
    )


def test_each_change_comes_with_its_new_peak_and_its_price(estimate, as_text):
    changes = Changes(fitting=(make_change(estimate),), all_together=None)
    lines = as_text(changes_table(changes, "tiny-gpu")).splitlines()
    assert lines[0] == "Cheapest changes that make it fit on tiny-gpu:"
    assert re.match(r"  peak \S+ \w+ +checkpointing.mode=full loss.chunk_tokens=512", lines[1])
    assert lines[2].strip() == "a second forward"


def test_where_no_change_is_enough_what_is_missing_is_said(estimate, as_text):
    limit = estimate.process_peak_bytes - 3 * GIB
    over = dataclasses.replace(
        estimate, budget=BudgetVerdict(device_bytes=limit, host_bytes=None), fits=False
    )
    text = as_text(changes_table(Changes(fitting=(), all_together=make_change(over)), "tiny-gpu"), 300)
    assert text.startswith("No change makes it fit on tiny-gpu. All of them together still need ")
    assert text.endswith("3.00 GiB over: checkpointing.mode=full loss.chunk_tokens=512\n")


def test_where_nothing_is_left_to_change_that_is_said(as_text):
    text = as_text(changes_table(Changes(fitting=(), all_together=None), "tiny-gpu"))
    assert text == "It does not fit on tiny-gpu, and no other setting would need less.\n"


@pytest.mark.parametrize(
    "dollars,text",
    [
        (12.4, "$12.40"),
        (0.1, "$0.10"),
        (0.0998, "$0.10"),
        (0.05, "$0.050"),
        (0.0389, "$0.039"),
        (0.0071, "$0.0071"),
    ],
)
def test_prices_keep_two_digits_that_count(dollars, text):
    assert format_dollars(dollars) == text
