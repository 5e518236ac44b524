"""A run says how much memory it took, beside what it was allowed."""

from __future__ import annotations

import logging

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState

from lowmem_ft.foundation.budget import Budget
from lowmem_ft.foundation.catalog.context_overhead import BITSANDBYTES_BYTES, NCCL_BYTES_OF_TWO
from lowmem_ft.foundation.catalog.gpu_catalog import load_gpus
from lowmem_ft.foundation.errors import DoesNotFitError, UserError
from lowmem_ft.foundation.system.host_limits import HostLimit
from lowmem_ft.foundation.system.host_memory import MemoryReading
from lowmem_ft.foundation.units import GIB
from lowmem_ft.recipe import TrainingConfig
from lowmem_ft.training.runtimes.accelerate_runtime import launched_runtime
from lowmem_ft.training.step import budget_cap
from lowmem_ft.training.step.budget_cap import BudgetWatch, apply_budget, lift_cap

CPU = torch.device("cpu")
CONTEXT_BYTES = load_gpus()["h100-80gb"].context_bytes
"""Of the card that the fixture ``cuda_driver`` calls itself."""


@pytest.mark.parametrize(
    "budget,said",
    [
        (Budget(), []),
        (Budget(host="1TiB"), [", within budget.host=1TiB."]),
        (Budget(host="1KiB"), [", above budget.host=1KiB."]),
        (Budget(device="1KiB"), [", above budget.device=1KiB."]),
    ],
)
def test_peaks_stand_beside_the_budget(budget, said, caplog):
    with caplog.at_level(logging.INFO):
        BudgetWatch(budget, CPU).report()
    assert len(caplog.messages) == len(said)
    assert all(text in message for text, message in zip(said, caplog.messages, strict=True))


@pytest.fixture
def peak_of_8_with_2_left(monkeypatch):
    """GiB that the process held and holds; no page of a file is resident."""
    monkeypatch.setattr(budget_cap, "read_host_memory", lambda: MemoryReading(2 * GIB, 8 * GIB))
    monkeypatch.setattr(budget_cap, "resident_file_bytes", lambda: 0)


@pytest.mark.parametrize(
    "budget,file_bytes,said",
    [
        ("3GiB", 6 * GIB, "Peak host memory: 2.00 GiB, within"),
        ("3GiB", 1, "Peak host memory: 8.00 GiB, above"),
        ("1GiB", 20 * GIB, "Peak host memory: 2.00 GiB, above"),  # of which few were there at the peak
    ],
)
def test_pages_of_mapped_files_count_for_no_budget(budget, file_bytes, said, caplog, peak_of_8_with_2_left):
    with caplog.at_level(logging.INFO):
        BudgetWatch(Budget(host=budget), CPU).report(file_bytes=file_bytes)
    assert said in caplog.text


@pytest.mark.parametrize(
    "budget,share",
    [
        (Budget(device="20GiB"), (20 * 2**30 - CONTEXT_BYTES) / (80 * 2**30)),
        (Budget(device="20GiB", enforce=False), 1.0),
        (Budget(), 1.0),
        (Budget(device="84GiB"), 1.0),  # the size a card is sold with is all that its driver leaves
    ],
)
def test_the_process_stays_within_the_budget_as_the_allocator_is_capped(cuda_driver, budget, share):
    driver = cuda_driver()
    driver.hold(2**30, 30 * 2**30)
    apply_budget(budget, torch.device("cuda", 0))
    assert driver.fraction == share
    if budget.device is not None and budget.enforce:
        assert driver.bytes["reserved"] == 2**30, "cached memory would be handed out beside the budget"
    lift_cap(budget)
    assert driver.fraction == 1.0


def test_a_cpu_has_no_allocator_to_cap(cuda_driver):
    driver = cuda_driver()
    apply_budget(Budget(device="20GiB"), CPU)
    assert driver.fraction == 1.0


def test_a_budget_beyond_the_device_is_refused(cuda_driver):
    cuda_driver()
    with pytest.raises(UserError, match=r"budget.device=85GiB is more than this device has \(80.0 GiB\)"):
        apply_budget(Budget(device="85GiB"), torch.device("cuda", 0))


def test_a_budget_that_others_leave_no_room_for_is_said(cuda_driver, caplog):
    driver = cuda_driver()
    device = torch.device("cuda", 0)
    driver.bytes["others"] = 30 * 2**30
    apply_budget(Budget(device="45GiB"), device)
    assert caplog.messages == []
    apply_budget(Budget(device="60GiB"), device)
    assert len(caplog.messages) == 1
    assert "of this device's 80.0 GiB: only " in caplog.text
    assert "of budget.device=60GiB are available." in caplog.text


def test_a_budget_of_the_size_a_card_is_sold_with_says_nothing(cuda_driver, caplog):
    cuda_driver()
    apply_budget(Budget(device="84GiB"), torch.device("cuda", 0))
    assert caplog.messages == []


def test_peaks_on_a_device_are_its_allocators(cuda_driver, caplog):
    cuda_driver().hold(3 * 2**30, 4 * 2**30)
    with caplog.at_level(logging.INFO):
        BudgetWatch(Budget(device="20GiB"), torch.device("cuda", 0)).report()
    assert "Peak device memory: 3.00 GiB, within budget.device=20GiB." in caplog.messages


def test_a_run_by_itself_can_be_capped(cuda_driver, tmp_path):
    """Accelerate says ``cuda`` to a single process, and torch caps only a device that has a number."""
    driver = cuda_driver()
    PartialState._reset_state()
    try:
        runtime = launched_runtime(TrainingConfig(), tmp_path)
        assert runtime.machine.device == torch.device("cuda", 0)
        apply_budget(Budget(device="20GiB"), runtime.machine.device)
    finally:
        PartialState._reset_state()
        AcceleratorState._reset_state()
    assert driver.fraction == (20 * 2**30 - CONTEXT_BYTES) / (80 * 2**30)


def test_what_lies_outside_the_allocator_is_taken_off(cuda_driver):
    driver, device = cuda_driver(), torch.device("cuda", 0)
    apply_budget(Budget(device="20GiB"), device)
    alone = driver.fraction
    apply_budget(Budget(device="20GiB"), device, uses_bitsandbytes=True, num_processes=2)
    assert (alone - driver.fraction) * 80 * 2**30 == pytest.approx(BITSANDBYTES_BYTES + NCCL_BYTES_OF_TWO)
    with pytest.raises(
        DoesNotFitError, match=r"budget.device=300MiB leaves nothing for tensors.*CUDA context"
    ):
        apply_budget(Budget(device="300MiB"), device)


def test_a_machine_that_is_nearly_full_is_said_once(caplog, monkeypatch):
    left = HostLimit(100 * 2**20, "the container has 100 MiB left of the limit in /sys/fs/cgroup")
    monkeypatch.setattr(budget_cap, "tightest_host_limit", lambda budget_bytes, *, file_bytes: left)
    watch = BudgetWatch(Budget(), CPU)
    watch.after_step()
    watch.after_step()
    assert len(caplog.messages) == 1
    assert "the container has 100 MiB left" in caplog.text


def test_a_budget_below_what_the_libraries_take_is_refused_before_the_model_is_loaded():
    for budget in (Budget(device="1KiB"), Budget(host="1KiB")):
        with pytest.raises(
            DoesNotFitError, match=r"budget\.\w+=1KiB is less than this process holds before the model"
        ):
            apply_budget(budget, CPU)
    apply_budget(Budget(device="1KiB", enforce=False), CPU)
    apply_budget(Budget(device="1TiB", host="1TiB"), CPU)


def test_a_first_step_beyond_a_cpus_budget_ends_the_run():
    with pytest.raises(
        DoesNotFitError, match=r"budget\.device=1KiB is less than this process took for one step"
    ):
        BudgetWatch(Budget(device="1KiB"), CPU).after_step()


def test_growing_beyond_a_budget_later_is_said_once_and_at_once(caplog, monkeypatch):
    peaks = iter([5, 5, 2000, 3000])
    monkeypatch.setattr(budget_cap, "read_host_memory", lambda: MemoryReading(0, next(peaks)))
    watch = BudgetWatch(Budget(device="1KiB"), CPU)
    said = []
    for _ in range(4):
        watch.after_step()
        said.append(len(caplog.messages))
    assert said == [0, 0, 1, 1]
    assert caplog.messages == ["Host memory has grown to 1.95 KiB, above budget.device=1KiB."]


def test_processes_of_a_machine_share_its_host(caplog, monkeypatch):
    monkeypatch.setattr(budget_cap, "read_host_memory", lambda: MemoryReading(2 * GIB, 2 * GIB))
    monkeypatch.setattr(budget_cap, "resident_file_bytes", lambda: 0)
    budget = Budget(host="6GiB")
    apply_budget(budget, CPU, num_processes_here=3)
    with pytest.raises(DoesNotFitError, match=r"^budget\.host=6GiB shared by 4 processes is less than"):
        apply_budget(budget, CPU, num_processes_here=4)
    BudgetWatch(budget, CPU, 4).after_step()
    BudgetWatch(budget, CPU, 4).report()
    assert caplog.messages == [
        "Host memory has grown to 2.00 GiB, above budget.host=6GiB shared by 4 processes.",
        "Peak host memory: 2.00 GiB, above budget.host=6GiB shared by 4 processes.",
    ]


def test_pages_of_files_and_a_gpus_budget_do_not_count_for_the_host(peak_of_8_with_2_left):
    BudgetWatch(Budget(device="3GiB"), CPU).after_step(file_bytes=6 * GIB)
    BudgetWatch(Budget(device="1KiB"), torch.device("cuda", 0)).after_step()
    with pytest.raises(DoesNotFitError):  # the same without pages of files
        BudgetWatch(Budget(device="3GiB"), CPU).after_step()
