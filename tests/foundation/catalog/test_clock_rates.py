"""The shares of published rates by architecture: which entry holds for which GPU, and that each number has a source."""

import dataclasses
import math

import pytest

from lowmem_ft.foundation.catalog.clock_rates import (
    HOST_NUMBERS,
    KNOWN_SHARE,
    NUMBERS,
    UNKNOWN_SHARE,
    clock_rates,
    rate_entries,
    reference_host,
)
from lowmem_ft.foundation.catalog.gpu_catalog import load_gpus

GPUS = load_gpus()


def test_every_number_has_a_source_and_every_entry_a_gpu():
    capabilities = {"{}.{}".format(*gpu.compute_capability) for gpu in GPUS.values()}
    for entry in rate_entries():
        numbers = {name for name in NUMBERS if name in entry} - {"num_rows"}
        assert numbers
        assert entry["sources"].keys() == numbers
        assert set(entry.get("gpus", ())) <= GPUS.keys()
        assert entry.get("compute_capability", "8.0") in capabilities


def test_an_unknown_architecture_has_the_default_and_its_wide_range():
    default = clock_rates()
    assert clock_rates("new", (99, 0)) == default
    assert default.num_rows == 0
    whole = {"products": 0.5, "element-wise": 0.5}
    assert default.share_with(whole) > clock_rates("t4", (7, 5)).share_with(whole)


def test_a_step_that_spends_more_on_a_kind_of_work_than_any_timed_run_is_unlike_them():
    rates = dataclasses.replace(
        clock_rates(),
        num_rows=9,
        known_kinds=(),
        seconds_share=0.2,
        measured_shares={"attention": 0.15, "element-wise": 0.4},
    )
    like = {"attention": 0.2, "element-wise": 0.45, "host copies": 0.05}
    assert rates.unlike_measured(like) == ()
    assert rates.unlike_measured({**like, "element-wise": 0.6}) == ("element-wise",)
    assert rates.unlike_measured({**like, "communication": 0.3}) == ("communication",)
    known = dataclasses.replace(rates, known_kinds=("element-wise",))
    assert known.unlike_measured({**like, "element-wise": 0.6}) == ()
    unmeasured = dataclasses.replace(rates, num_rows=0)
    assert unmeasured.unlike_measured({"communication": 0.3}) == ()  # no run to be unlike


def test_a_range_grows_with_what_no_timed_run_had():
    """Kinds that rest on one number are off together, others by themselves; what runs had is in the range already."""
    rates = dataclasses.replace(
        clock_rates(), seconds_share=0.2, known_kinds=("products",), measured_shares={"products": 0.4}
    )

    def distance(**shares):
        whole = rates.share_with({name.replace("_", " "): share for name, share in shares.items()})
        return math.sqrt(math.log1p(whole) ** 2 - math.log1p(0.2) ** 2)

    known, unknown = math.log1p(KNOWN_SHARE), math.log1p(UNKNOWN_SHARE)
    assert distance(products=0.4) == pytest.approx(0.0, abs=1e-6)
    assert distance(products=0.9) == pytest.approx(0.5 * known)
    assert distance(attention=0.2, attention_backward=0.3) == pytest.approx(0.5 * unknown)
    assert distance(attention=0.3, reductions=0.4) == pytest.approx(0.5 * unknown)


def test_the_last_entry_that_applies_wins():
    entries = [
        {**dict.fromkeys(NUMBERS, 1.0), "traffic": {"updates": 0.5, "fused kernels": 0.7}, "known_kinds": ()},
        {"compute_capability": "9.0", "products": 0.8, "bandwidth": 0.9},
        {"gpus": ["slow"], "products": 0.5, "traffic": {"updates": 0.4}},
    ]
    slow, other = (clock_rates(name, (9, 0), entries) for name in ("slow", "other"))
    assert (slow.products, slow.bandwidth, slow.attention) == (0.5, 0.9, 1.0)
    assert (other.products, other.bandwidth) == (0.8, 0.9)
    assert slow.traffic == {"updates": 0.4, "fused kernels": 0.7}  # each kind's share for itself


def test_a_gpu_of_the_catalogue_has_its_architectures_rates():
    assert GPUS["rtx-4090"].rates.products > GPUS["l40s"].rates.products > GPUS["l4"].rates.products
    assert GPUS["b200"].rates != GPUS["h100-80gb"].rates
    assert GPUS["a100-40gb"].rates == GPUS["a100-80gb"].rates


@pytest.mark.parametrize("name", GPUS)
def test_no_product_is_faster_than_a_boosted_clock_allows(name):
    """A share far above 1, or below a third, would mean that the catalogue has another peak than the microbenchmark."""
    rates = GPUS[name].rates
    assert 0.33 <= rates.products <= 1.15
    assert 0.2 <= rates.attention <= 1
    assert 0.33 <= rates.bandwidth <= 0.95
    assert rates.launch_seconds < rates.operator_seconds


def host_of(rates):
    return {name: getattr(rates, name) for name in HOST_NUMBERS}


def test_all_gpus_are_estimated_with_one_host():
    """A B200's publisher had a host three times as fast as an L40S's, and the order of GPUs went by that."""
    hosts = [host_of(gpu.rates) for gpu in GPUS.values()]
    assert hosts == [reference_host()] * len(GPUS)
    fields = [field.name for field in dataclasses.fields(GPUS["b200"]) if field.name != "rates"]
    assert all(
        getattr(GPUS["b200"].in_its_rows_machine, name) == getattr(GPUS["b200"], name) for name in fields
    )


def test_runs_that_were_timed_are_predicted_with_the_hosts_of_their_machines():
    seconds = {
        name: GPUS[name].in_its_rows_machine.rates.operator_seconds for name in ("b200", "l40s", "t4", "h200")
    }
    assert seconds["b200"] < seconds["h200"] < seconds["l40s"] < seconds["t4"]
    for gpu in GPUS.values():
        assert gpu.in_its_rows_machine.rates == clock_rates(gpu.name, gpu.compute_capability)


def test_the_host_of_estimates_is_the_one_in_the_middle_taken_whole():
    default = dict.fromkeys(NUMBERS, 1.0)
    fitted = [
        {"fitted": True, "operator_seconds": 2.0, "triton_launch": 7.0},
        {"fitted": True, "operator_seconds": 9.0},
        {"fitted": True, "products": 0.5},  # whose runs tell nothing of their host
        {"gpus": ["other"], "operator_seconds": 5.0},  # nobody timed runs there
    ]
    assert reference_host([default, *fitted]) == {
        "operator_seconds": 2.0,
        "triton_launch": 7.0,
        "launch_seconds": 1.0,
    }
    known = sorted(
        entry["operator_seconds"]
        for number, entry in enumerate(rate_entries())
        if "operator_seconds" in entry and (number == 0 or entry.get("fitted"))
    )
    assert reference_host()["operator_seconds"] == known[(len(known) - 1) // 2]
