"""Which device an estimate is for, and what it may take there."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lowmem_ft.foundation.budget import Budget
from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu, load_gpus
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.units import GIB
from lowmem_ft.planning.estimator.device_target import budget_beyond, capped_bytes, choose_gpu, limits


@pytest.fixture
def _no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def chosen(gpu=None, budget: Budget | None = None, use_cpu: bool = False):
    return choose_gpu(gpu, budget or Budget(), use_cpu=use_cpu)


def test_what_is_asked_for_is_taken_without_a_reason():
    t4 = find_gpu("t4")
    assert chosen("t4") == chosen("Tesla T4") == chosen(t4) == (t4, "")
    assert chosen("cpu") == (None, "")
    with pytest.raises(UserError, match="Did you mean `rtx-4090`"):
        chosen("rtx-409")


@pytest.mark.usefixtures("_no_gpu")
def test_without_a_gpu_it_is_the_processor_or_what_the_budget_buys():
    assert chosen() == (None, "device: this machine's processor, because it has no GPU")
    assert chosen(budget=Budget(device="24GiB"), use_cpu=True)[0] is None
    gpu, reason = chosen(budget=Budget(device="24GiB"))
    assert gpu is not None
    assert gpu.name in reason
    assert "budget.device=24GiB" in reason


@pytest.mark.usefixtures("_no_gpu")
@pytest.mark.parametrize("nominal", [8, 12, 16, 24, 32, 40, 48, 80])
def test_a_budget_buys_the_cheapest_hour_among_the_cards_sold_with_that_size_or_more(nominal):
    gpu, _ = chosen(budget=Budget(device=f"{nominal}GiB"))
    assert gpu is not None
    assert gpu.memory_bytes >= 0.95 * nominal * GIB
    prices = [
        other.cheapest_price.usd_per_hour
        for other in load_gpus().values()
        if other.memory_bytes >= 0.95 * nominal * GIB
        and other.cheapest_price
        and other.compute_capability >= (8, 0)
    ]
    assert gpu.cheapest_price is not None
    assert gpu.cheapest_price.usd_per_hour == min(prices)


@pytest.mark.usefixtures("_no_gpu")
@pytest.mark.parametrize("size,name", [("24GiB", "rtx-3090"), ("80GiB", "a100-80gb-pcie")])
def test_a_card_whose_driver_keeps_some_of_its_memory_counts(size, name):
    gpu, _ = chosen(budget=Budget(device=size))
    assert gpu is not None
    assert gpu.memory_bytes < int(size.removesuffix("GiB")) * GIB
    assert find_gpu(name).cheapest_price == gpu.cheapest_price


@pytest.mark.usefixtures("_no_gpu")
def test_a_budget_that_no_gpu_has_is_refused():
    with pytest.raises(UserError, match=r"budget.device=500GiB is more than any GPU of the catalogue has"):
        chosen(budget=Budget(device="500GiB"))


def test_this_machines_gpu_comes_before_the_budget(cuda_driver):
    cuda_driver(name="NVIDIA GeForce RTX 4090", total_memory=23 * GIB, multi_processor_count=100)
    gpu, reason = chosen(budget=Budget(device="12GiB"))
    assert gpu is not None
    assert (gpu.name, gpu.memory_bytes, gpu.num_multiprocessors) == ("rtx-4090", 23 * GIB, 100)
    assert reason == "device: this machine's NVIDIA GeForce RTX 4090"
    assert chosen(use_cpu=True)[0] is None


def test_the_limit_is_the_budget_and_never_more_than_the_device_has():
    t4 = find_gpu("t4")
    assert limits(t4, Budget()).device_bytes == t4.memory_bytes
    assert limits(t4, Budget(device="10GiB")).device_bytes == 10 * GIB
    assert limits(t4, Budget(device="24GiB")).device_bytes == t4.memory_bytes
    assert limits(None, Budget()).device_bytes is None
    assert limits(None, Budget(host="3GiB")).host_bytes == 3 * GIB


def test_what_others_hold_cannot_be_had():
    crowded = dataclasses.replace(find_gpu("t4"), held_by_others_bytes=GIB)
    assert limits(crowded, Budget()).device_bytes == crowded.memory_bytes - GIB
    assert limits(crowded, Budget(device="14GiB")).device_bytes == crowded.memory_bytes - GIB
    assert limits(crowded, Budget(device="10GiB")).device_bytes == 10 * GIB


def test_a_budget_beyond_the_device_is_said():
    assert "14.6 GiB that t4 has, because budget.device=24GiB is more" in budget_beyond(
        find_gpu("t4"), Budget(device="24GiB")
    )
    assert budget_beyond(find_gpu("rtx-4090"), Budget(device="24GiB")) == ""
    assert budget_beyond(find_gpu("t4"), Budget()) == budget_beyond(None, Budget(device="1GiB")) == ""


def test_the_allocator_is_capped_where_training_would_cap_it():
    assert capped_bytes(Budget(device="10GiB"), {"context": 3 * GIB}) == 7 * GIB
    assert capped_bytes(Budget(device="10GiB", enforce=False), {}) is None
    assert capped_bytes(Budget(), {}) is None
