"""Every GPU of the catalogue is complete, plausible and in the right units; unknown ones are explained."""

from __future__ import annotations

import json
import re
from importlib import resources

import pytest

from lowmem_ft.foundation.catalog.gpu_catalog import _unlisted_device, find_gpu, load_gpus
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.memory.uncertainty import ESTIMATED_CONTEXT_SHARE
from lowmem_ft.foundation.units import GIB, MIB

GPUS = load_gpus()
GEFORCE = [name for name in GPUS if re.fullmatch(r"rtx-\d{4}.*", name) and name != "rtx-6000-ada"]
FIRST_WITH_BFLOAT16 = (8, 0)


@pytest.mark.parametrize("name", GPUS)
def test_a_row_is_complete_and_plausible(name):
    gpu = GPUS[name]
    assert re.fullmatch(r"[a-z0-9-]+", gpu.name)
    assert 7 * GIB < gpu.memory_bytes < 200 * GIB
    assert gpu.nvidia_smi_bytes is not None
    assert 0 <= gpu.nvidia_smi_bytes - gpu.memory_bytes < 900 * MIB
    assert 20 <= gpu.num_multiprocessors <= 200
    assert 2e11 < gpu.bandwidth < 1e13
    assert gpu.pcie_generation in (3, 4, 5)
    assert gpu.pcie_lanes in (8, 16)
    assert 100 * MIB < gpu.context_bytes < 900 * MIB
    assert gpu.sources.keys() >= {"memory_mib", "dense_tflops", "hardware", "context_mib"}
    assert all(gpu.sources.values())


def test_estimated_contexts_are_told_from_those_that_were_read():
    """The formula of the estimates is as near to the contexts that were read as the uncertainty says.

    Hopper's were read with CUDA 13, whose kernels take some 200 MiB more than those of CUDA 12, with which all others
    were: what an estimated context lacks with CUDA 13 on another GPU is not known.
    """
    read = [gpu for gpu in GPUS.values() if not gpu.context_is_estimate]
    assert {"t4", "l4", "a100-80gb", "h100-80gb"} <= {gpu.name for gpu in read} < GPUS.keys()
    threads = {(7, 5): 1024, (8, 0): 2048, (8, 9): 1536}  # that a multiprocessor can hold
    for gpu in read:
        if gpu.compute_capability == (9, 0):
            continue
        formula = gpu.num_multiprocessors * threads[gpu.compute_capability] * 2048 + 36 * MIB
        assert gpu.context_bytes == pytest.approx(formula, rel=ESTIMATED_CONTEXT_SHARE), gpu.name


@pytest.mark.parametrize("name", GPUS)
def test_rates_are_dense_and_of_the_types_the_hardware_has(name):
    gpu = GPUS[name]
    modern = gpu.compute_capability >= FIRST_WITH_BFLOAT16
    assert ("bfloat16" in gpu.dense_flops) == ("tf32" in gpu.dense_flops) == modern
    assert 5e12 < gpu.dense_flops["float32"] <= gpu.dense_flops["float16"] < 3e15
    if modern:
        assert gpu.dense_flops["bfloat16"] == gpu.dense_flops["float16"]
        # A sparse or an fp16-accumulate rate beside a dense one would be off by two.
        assert gpu.dense_flops["bfloat16"] / gpu.dense_flops["tf32"] == pytest.approx(2, rel=0.03)


@pytest.mark.parametrize("name", [name for name in GEFORCE if GPUS[name].compute_capability >= (8, 6)])
def test_geforce_tensor_cores_accumulate_in_float32_at_half_rate(name):
    rates = GPUS[name].dense_flops
    assert rates["bfloat16"] / rates["float32"] == pytest.approx(2, rel=0.01)


def test_the_memory_is_what_torch_prints_not_the_box():
    assert GPUS["t4"].memory_bytes == 14912 * MIB
    assert GPUS["h200"].nvidia_smi_bytes == 143771 * MIB
    assert GPUS["rtx-5090"].memory_bytes == 33680457728 // MIB * MIB


def test_prices_have_a_provider_a_date_and_a_source():
    prices = [price for gpu in GPUS.values() for price in gpu.prices]
    assert len(prices) > 80
    for price in prices:
        assert price.provider
        assert 0.05 < price.usd_per_hour < 15
        assert re.fullmatch(r"20\d\d-[01]\d(-[0-3]\d)?", price.date)
        assert "https://" in price.source


def test_every_price_list_names_gpus_of_the_catalogue():
    price_lists = json.loads((resources.files("lowmem_ft.foundation.catalog") / "prices.json").read_text())
    assert {name for price_list in price_lists for name in price_list["usd_per_hour"]} <= GPUS.keys()


def test_the_cheapest_price_is_the_lowest():
    gpu = GPUS["h100-80gb"]
    assert gpu.cheapest_price is not None
    assert gpu.cheapest_price.usd_per_hour == min(price.usd_per_hour for price in gpu.prices)
    assert GPUS["p100"].cheapest_price is None


@pytest.mark.parametrize("name", ["rtx-4090", "RTX 4090", "rtx_4090 ", "NVIDIA GeForce RTX 4090"])
def test_capitals_blanks_and_underscores_are_forgiven(name):
    assert find_gpu(name) is GPUS["rtx-4090"]


@pytest.mark.parametrize(
    "name, what",
    [
        ("h20", "another product"),
        ("8xB300", "another product"),
        ("mi300x", "AMD's"),
        ("m3-max", "Apple's"),
        ("NVIDIA GB10", "shares the host's memory"),
        ("jetson-orin", "shares the host's memory"),
        ("l6", ""),
    ],
)
def test_another_product_is_not_taken_for_a_misspelt_one(name, what):
    with pytest.raises(UserError, match="no GPU") as error:
        find_gpu(name)
    assert what in str(error.value)
    assert "Did you mean" not in str(error.value)
    assert ("such as budget=96GiB" in str(error.value)) == bool(what)


def test_no_gpu_of_the_catalogue_is_said_to_be_none():
    assert [name for name, gpu in load_gpus().items() if _unlisted_device(name)] == []
