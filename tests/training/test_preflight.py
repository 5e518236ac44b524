"""A run is held to its estimate before a weight is read; who estimates comes from outside."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from lowmem_ft.foundation.budget import Budget
from lowmem_ft.foundation.errors import DoesNotFitError
from lowmem_ft.foundation.memory.memory_estimate import (
    BudgetVerdict,
    DeviceLimit,
    MemoryEstimate,
    ModelSize,
    Processes,
    ProcessRange,
    StepTime,
)
from lowmem_ft.foundation.memory.uncertainty import Uncertainty
from lowmem_ft.recipe import Recipe
from lowmem_ft.training.run.loop import train
from lowmem_ft.training.run.preflight import check_estimate

GIB = 2**30


def an_estimate(
    *, process: float = 10, high: float | None = None, host: float = 4, limit: float = 16, fits: bool = True
):
    return MemoryEstimate(
        model=ModelSize(name="m", parameters=1, trainable_parameters=1),
        gpu=DeviceLimit(name="some-gpu", memory_bytes=16 * GIB),
        allocated_peak_bytes=round(process * GIB),
        reserved_peak_bytes=round(process * GIB),
        process_peak_bytes=round(process * GIB),
        process_range=ProcessRange(
            low_bytes=0,
            high_bytes=round((high or process) * GIB),
            uncertainty=Uncertainty(reserved_share=0.01, outside_share=0.1),
        ),
        host_peak_bytes=round(host * GIB),
        host_pinned_bytes=0,
        by_category_at_peak={"parameter": 2 * GIB, "activation": 7 * GIB, "gradient": GIB, "input": 1},
        by_phase={"backward": round(process * GIB)},
        peak_phase="backward",
        peak_module="model.layers.3.mlp",
        step=StepTime(seconds=1.5, tokens=10, bound_by="compute"),
        budget=BudgetVerdict(device_bytes=round(limit * GIB), host_bytes=None),
        fits=fits,
    )


class Estimates:
    """Says what it was asked, and answers with one estimate; :class:`lowmem_ft.training.run.preflight.Preflight`."""

    def __init__(self, estimate: MemoryEstimate | None) -> None:
        self.estimate = estimate
        self.calls: list = []

    def begin(self, recipe, device):
        self.calls.append(("begin", device.type))

    def finish(self, longest_row):
        self.calls.append(("finish", longest_row))
        return self.estimate

    def close(self):
        self.calls.append(("close", None))


def test_one_line_says_what_a_run_needs(caplog):
    with caplog.at_level(logging.INFO):
        check_estimate(Recipe(), an_estimate())
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert record.message == "Estimated: 10.0 GiB of device memory, 4.00 GiB of host memory, 1.5 s a step."


def test_several_processes_are_told_what_the_estimate_leaves_out(caplog):
    check_estimate(Recipe(), an_estimate(), num_processes=2)
    (record,) = caplog.records
    assert record.message.startswith(
        "The estimate is for a single process. Each of these 2 processes takes more"
    )


@pytest.mark.parametrize(
    "estimate,words",
    [
        (an_estimate(process=15.5), "a tight fit"),
        (
            dataclasses.replace(an_estimate(process=15, high=17, fits=False), fits_at_low_end=True),
            "It may not fit: the upper end of the estimate's range, 17.0 GiB, is above the limit.",
        ),
    ],
)
def test_what_may_not_fit_is_warned_of_and_trained(estimate, words, caplog):
    check_estimate(Recipe(), estimate)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert words in record.message


def test_what_is_refused_by_its_figure_alone_may_not_fit():
    over = an_estimate(process=17, fits=False)
    for estimate, words in (
        (over, "The run is estimated to need 17.0 GiB"),
        (
            dataclasses.replace(over, fits_at_low_end=True),
            "The run may not fit: it is estimated to need 17.0 GiB",
        ),
    ):
        with pytest.raises(DoesNotFitError, match=f"^{words}"):
            check_estimate(Recipe(), estimate)


@pytest.mark.parametrize(
    "budget,estimate,words",
    [
        (
            Budget(device="8GiB"),
            an_estimate(limit=8, fits=False),
            "2.00 GiB more than budget.device=8GiB allows",
        ),
        (Budget(), an_estimate(process=20, fits=False), "4.00 GiB more than the 16.0 GiB of this device"),
        (
            Budget(host="3GiB"),
            dataclasses.replace(
                an_estimate(fits=False), budget=BudgetVerdict(device_bytes=None, host_bytes=3 * GIB)
            ),
            "1.00 GiB more than budget.host=3GiB allows",
        ),
        (
            Budget(host="12GiB"),
            dataclasses.replace(
                an_estimate(fits=False),
                budget=BudgetVerdict(device_bytes=None, host_bytes=3 * GIB),
                processes=Processes(strategy="fsdp2", num_processes=8, num_machines=2),
            ),
            "1.00 GiB more than budget.host=12GiB shared by 4 processes allows",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_shortfall_and_what_makes_the_peak(
    budget, estimate, words, caplog
):
    with pytest.raises(DoesNotFitError) as refused:
        check_estimate(Recipe(budget=budget), estimate)
    assert words in str(refused.value)
    assert "backward at model.layers.3.mlp: activation 7.00 GiB, parameter 2.00 GiB" in str(refused.value)
    check_estimate(Recipe(budget=dataclasses.replace(budget, enforce=False)), estimate)
    assert words in caplog.text


def test_a_run_is_refused_before_its_weights_are_read(tiny, monkeypatch):
    monkeypatch.setattr(
        "lowmem_ft.training.runtimes.values.Values.load_model",
        lambda *_, **__: pytest.fail("weights were read"),
    )
    preflight = Estimates(an_estimate(process=20, fits=False))
    with pytest.raises(DoesNotFitError):
        train(tiny(), preflight=preflight)


def test_rows_count_as_long_as_they_are(tiny):
    """The recipe allows 256 tokens, and no example has as many."""
    preflight = Estimates(an_estimate(process=20, fits=False))
    with pytest.raises(DoesNotFitError):
        train(tiny("data.max_length=256"), preflight=preflight)
    assert preflight.calls[0] == ("begin", "cpu")
    _, longest = preflight.calls[1]
    assert longest is not None
    assert longest < 128
    assert longest % 8 == 0


def test_packed_rows_are_full_so_that_nobody_waits_for_the_data(tiny, monkeypatch):
    monkeypatch.setattr("lowmem_ft.training.run.run_parts.read_data", lambda *_: pytest.fail("data was read"))
    preflight = Estimates(an_estimate(process=20, fits=False))
    with pytest.raises(DoesNotFitError):
        train(tiny("data.packing=true"), preflight=preflight)
    assert preflight.calls == [("begin", "cpu"), ("finish", None)]


def test_nobody_is_asked_who_is_not_wanted(tiny):
    preflight = Estimates(None)
    train(tiny("budget.preflight=false", "training.max_steps=1"), preflight=preflight)
    assert preflight.calls == []
