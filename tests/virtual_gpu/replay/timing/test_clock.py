"""The clock agrees with sums done by hand, and streams, events and the host hold each other back as on a GPU."""

import dataclasses
import itertools
import random
import sys
from collections import Counter

import pytest
import torch

from lowmem_ft.foundation.catalog.clock_rates import rates_of_estimates
from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.virtual_gpu.calls.work import Work
from lowmem_ft.virtual_gpu.replay.timing.clock import Clock, host_link_rate
from lowmem_ft.virtual_gpu.replay.timing.dma_engine import DmaEngine
from lowmem_ft.virtual_gpu.replay.timing.kernel_rates import matmul_rate

RATES = rates_of_estimates()
LAUNCH = RATES.operator_seconds


def make_gpu(**changes) -> Gpu:
    fields = {
        "name": "h100-80gb",
        "full_name": "NVIDIA H100 80GB HBM3",
        "memory_bytes": 85_520_809_984,
        "nvidia_smi_bytes": 85_520_809_984,
        "compute_capability": (9, 0),
        "num_multiprocessors": 132,
        "dense_flops": {"float32": 67e12, "tf32": 494e12, "bfloat16": 989e12, "float16": 989e12},
        "bandwidth": 3.35e12,
        "pcie_generation": 5,
        "pcie_lanes": 16,
        "context_bytes": 500_000_000,
        "sources": {},
    }
    return Gpu(**fields | changes)


H100 = make_gpu()


def computing(seconds: float, stream: int = 0) -> Work:
    """A kernel that takes so long on the H100."""
    return Work(
        "kernel", 0, stream, "mm", flops=round(seconds * matmul_rate(H100, "bfloat16")), dtype="bfloat16"
    )


def moving(seconds: float, stream: int = 0) -> Work:
    """A kernel bound by memory traffic."""
    return Work("kernel", 0, stream, "add", num_bytes=round(seconds * H100.bandwidth * RATES.bandwidth))


def copying(seconds: float, stream: int = 0, *, blocking: bool = False, to_host: bool = False) -> Work:
    num_bytes = round(seconds * host_link_rate(H100))
    return Work("copy", 0, stream, "copy_", num_bytes=num_bytes, blocking=blocking, to_host=to_host)


def seconds_of(entries: list[Work], gpu: Gpu = H100) -> float:
    return Clock(entries).times_on(gpu).between(0, len(entries)).seconds


# --- one stream -------------------------------------------------------------------------------------------------------


def test_an_8b_step_takes_six_flops_a_parameter_and_token():
    """Matrix products of a Llama-3.1-8B step on 2048 tokens, at the achieved share of the peak."""
    parameters, tokens, products = 8.03e9 - 128256 * 4096, 2048, 32 * 7 * 3
    step = [Work("kernel", 0, flops=round(6 * parameters * tokens / products), dtype="bfloat16")] * products
    span = Clock(step).times_on(H100).between(0, len(step))
    assert span.seconds == pytest.approx(6 * parameters * tokens / (989e12 * RATES.products), rel=1e-3)
    assert span.bound_by == "compute"


def test_a_kernel_takes_the_longer_of_arithmetic_and_traffic():
    both = computing(0.010)
    both.num_bytes = moving(0.025).num_bytes
    times = Clock([both]).times_on(H100)
    assert times.ends[0] - times.starts[0] == pytest.approx(0.025)
    assert times.between(0, 1).bound_by == "memory bandwidth"


def test_small_kernels_are_bound_by_their_launches():
    entries = [computing(1e-6), moving(2e-6)] * 500
    span = Clock(entries).times_on(H100).between(0, 1000)
    assert span.seconds == pytest.approx(1000 * LAUNCH, rel=0.01)
    assert span.bound_by == "kernel launches"
    assert span.shares["compute"] == pytest.approx(500e-6 / span.seconds)
    assert sum(span.shares.values()) == pytest.approx(1)


def several(seconds: float, launches: int) -> Work:
    one = computing(seconds)
    one.launches = launches
    return one


def test_an_operator_of_several_small_kernels_takes_the_host_a_launch_each():
    span = Clock([several(1e-6, 20)] * 50).times_on(H100).between(0, 50)
    expected = 50 * (LAUNCH + 19 * RATES.launch_seconds)
    assert span.seconds == pytest.approx(expected, rel=0.01)
    assert span.bound_by == "kernel launches"


def test_python_and_launches_by_triton_keep_the_host_as_long_as_operators_do():
    after_python, by_triton = computing(1e-6), computing(1e-6)
    after_python.python_operators, by_triton.by_triton = 7.5, True
    for one, operators in ((after_python, 1 + 7.5), (by_triton, 1 + RATES.triton_launch)):
        span = Clock([one] * 50).times_on(H100).between(0, 50)
        assert span.seconds == pytest.approx(50 * LAUNCH * operators, rel=0.01)


def test_an_operator_begins_with_its_first_launch_and_ends_after_its_last():
    further = 19 * RATES.launch_seconds
    times = Clock([several(1e-6, 20)]).times_on(H100)
    assert times.starts[0] == pytest.approx(LAUNCH)
    assert times.ends[0] == pytest.approx(LAUNCH + further + 1e-6 / 20)
    long = Clock([several(0.010, 20)]).times_on(H100)
    assert long.ends[0] == pytest.approx(LAUNCH + 0.010), "the rest was issued meanwhile"
    behind = Clock([computing(0.010), several(0.001, 20), computing(0.002)]).times_on(H100)
    assert behind.ends[2] == pytest.approx(LAUNCH + 0.013), "all of it behind a long one"


def test_the_host_runs_ahead_of_long_kernels_until_it_synchronises():
    long, short = computing(0.010), computing(1e-6)
    times = Clock([long, short, Work("synchronize", 0), short]).times_on(H100)
    assert times.starts[1] == pytest.approx(times.ends[0]), "queued long before"
    assert times.ends[2] == pytest.approx(times.ends[1]), "the host waits"
    assert times.starts[3] == pytest.approx(times.ends[2] + LAUNCH), "and issues only then"


def test_a_span_counts_what_its_own_entries_add():
    entries = [computing(0.010), computing(0.020), computing(0.005)]
    times = Clock(entries).times_on(H100)
    assert times.between(1, 2).seconds == pytest.approx(0.020)
    assert times.between(1, 1).seconds == 0
    assert seconds_of([]) == 0


# --- streams ----------------------------------------------------------------------------------------------------------


def test_a_copy_on_its_own_stream_hides_behind_compute():
    entries = [copying(0.010, stream=1), computing(0.030)]
    assert seconds_of(entries) == pytest.approx(0.030, abs=3 * LAUNCH)
    on_one_stream = [copying(0.010), computing(0.030)]
    assert seconds_of(on_one_stream) == pytest.approx(0.040, abs=3 * LAUNCH)


def test_a_stream_waits_for_an_event_and_for_nothing_behind_it():
    entries = [
        copying(0.010, stream=1),
        Work("record", 0, 1, event=7),
        copying(0.050, stream=1),
        Work("wait", 0, 0, event=7),
        computing(0.001),
    ]
    times = Clock(entries).times_on(H100)
    assert times.starts[4] == pytest.approx(times.ends[0])
    assert times.ends[2] > times.ends[4]


def test_an_event_that_was_never_recorded_holds_nothing_back():
    assert seconds_of([Work("wait", 0, 0, event=3), computing(0.010)]) == pytest.approx(0.010 + LAUNCH)


def test_waiting_for_copies_is_what_bounds_a_starved_stream():
    layer = [
        copying(0.010, stream=1),
        Work("record", 0, 1, event=1),
        Work("wait", 0, 0, event=1),
        computing(0.002),
    ]
    span = Clock(layer * 10).times_on(H100).between(0, 40)
    assert span.seconds == pytest.approx(0.102, rel=0.01)
    assert span.bound_by == "host copies"
    assert span.shares["compute"] == pytest.approx(0.020 / 0.102, rel=0.02)


def test_a_host_that_waits_for_a_copy_starves_the_stream_too():
    layer = [
        copying(0.010, stream=1, to_host=True),
        Work("record", 0, 1, event=1),
        Work("synchronize", 0, event=1),
        computing(0.002),
    ]
    assert Clock(layer * 10).times_on(H100).between(0, 40).bound_by == "host copies"


def test_each_direction_of_the_link_has_its_own_engine():
    there, back = copying(0.010, stream=1), copying(0.010, stream=2, to_host=True)
    assert seconds_of([there, back]) == pytest.approx(0.010, abs=3 * LAUNCH)
    assert seconds_of([there, copying(0.010, stream=2)]) == pytest.approx(0.020, abs=3 * LAUNCH)


def after_computing(seconds: float, copy: Work) -> list[Work]:
    """A copy that its stream begins only after a kernel."""
    return [computing(seconds), Work("record", 0, 0, event=9), Work("wait", 0, copy.stream, event=9), copy]


def test_a_copy_that_waits_for_an_event_holds_no_other_one_up():
    times = Clock([*after_computing(0.010, copying(0.020, stream=1)), copying(0.004, stream=2)]).times_on(
        H100
    )
    assert times.ends[4] == pytest.approx(0.004, abs=4 * LAUNCH)
    assert times.ends[3] == pytest.approx(0.030, abs=4 * LAUNCH)


def test_a_copy_that_is_overtaken_goes_on_afterwards():
    times = Clock([*after_computing(0.010, copying(0.020, stream=1)), copying(0.014, stream=2)]).times_on(
        H100
    )
    assert times.starts[4] == pytest.approx(0.0, abs=4 * LAUNCH)
    assert times.ends[3] == pytest.approx(0.030, abs=4 * LAUNCH)
    assert times.ends[4] == pytest.approx(0.034, abs=4 * LAUNCH)


def test_a_copy_gets_the_first_moments_that_those_before_it_have_left():
    engine, choose, taken = DmaEngine(), random.Random(0), set()
    for number in range(300):
        ready, seconds = number + choose.randrange(40), choose.randrange(1, 5)
        free = itertools.islice((moment for moment in itertools.count(ready) if moment not in taken), seconds)
        expected = list(free)
        taken.update(expected)
        assert engine.carry(ready, seconds, now=number) == (expected[0], expected[-1] + 1)


def test_a_blocking_copy_holds_the_host():
    times = Clock([copying(0.010, stream=1, blocking=True), computing(0.001)]).times_on(H100)
    assert times.starts[1] == pytest.approx(times.ends[0] + LAUNCH)


def test_batched_kernels_equal_kernels_one_by_one():
    """The fast path for runs of kernels against the rule it stands for."""
    torch.manual_seed(0)
    entries = [computing(seconds) for seconds in (torch.rand(300) * 2 * LAUNCH).tolist()]
    times = Clock(entries).times_on(H100)
    ready = 0.0
    for index, entry in enumerate(entries):
        start = max((index + 1) * LAUNCH, ready)
        ready = start + entry.flops / matmul_rate(H100, "bfloat16")
        assert times.starts[index] == pytest.approx(start)
        assert times.ends[index] == pytest.approx(ready)


# --- the hardware -----------------------------------------------------------------------------------------------------


def test_a_type_that_the_hardware_lacks_runs_on_its_float32_units():
    t4 = make_gpu(dense_flops={"float32": 8.1e12, "float16": 65e12})
    assert matmul_rate(t4, "bfloat16") == matmul_rate(t4, "float32")
    assert matmul_rate(t4, "float16") == pytest.approx(65e12 * RATES.products)
    assert matmul_rate(t4, "int8") == pytest.approx(130e12 * RATES.products)
    assert matmul_rate(make_gpu(dense_flops={"float32": 8e12}), "int8") == pytest.approx(
        8e12 * RATES.products
    )


def test_float32_products_use_tf32_only_where_torch_may():
    assert matmul_rate(H100, "float32") == pytest.approx(67e12 * RATES.products)
    products = torch.backends.cuda.matmul
    before, products.fp32_precision = products.fp32_precision, "tf32"
    try:
        assert matmul_rate(H100, "float32") == pytest.approx(494e12 * RATES.products)
    finally:
        products.fp32_precision = before


def test_one_log_replays_on_many_gpus():
    log = Clock([computing(0.010), moving(0.010), copying(0.010)])
    slow = make_gpu(bandwidth=H100.bandwidth / 2, pcie_generation=4)
    fast_times, slow_times = log.times_on(H100), log.times_on(slow)
    took = slow_times.ends - slow_times.starts
    assert took == pytest.approx((fast_times.ends - fast_times.starts) * [1, 2, 2], rel=1e-3)


def test_kernels_between_two_copies_are_replayed_as_one():
    """Or the log of a large model, of 10^5 entries, would take its time on every GPU."""

    def calls(num_kernels):
        of_one = [computing(1e-4)] * num_kernels + [
            copying(1.0, stream=1)
        ]  # each copy waits for the one before
        log, found = Clock(of_one * 10), Counter()
        sys.setprofile(lambda frame, event, argument: found.update([event]))
        try:
            log.times_on(H100)
        finally:
            sys.setprofile(None)
        return found

    assert calls(500) == calls(5)


def test_a_gpu_reaches_the_shares_of_its_own_rates():
    slower = make_gpu(
        rates=dataclasses.replace(
            RATES, products=RATES.products / 2, bandwidth=RATES.bandwidth / 4, host_link=RATES.host_link / 5
        )
    )
    assert seconds_of([computing(0.010)], slower) == pytest.approx(0.020, abs=2 * LAUNCH)
    assert seconds_of([moving(0.010)], slower) == pytest.approx(0.040, abs=2 * LAUNCH)
    assert seconds_of([copying(0.010)], slower) == pytest.approx(0.050, abs=2 * LAUNCH)


def test_a_slower_host_issues_kernels_more_slowly_on_one_clock_for_both():
    log = Clock([computing(1e-6)] * 100)
    slower = make_gpu(rates=dataclasses.replace(RATES, operator_seconds=3 * LAUNCH))
    seconds = [log.times_on(gpu).between(0, 100).seconds for gpu in (H100, slower, H100)]
    assert seconds[1] == pytest.approx(3 * seconds[0], rel=0.01)
    assert seconds[2] == seconds[0]


def test_fused_attention_reaches_a_share_of_its_own():
    attention = computing(0.010)
    attention.name = "_scaled_dot_product_flash_attention"
    assert seconds_of([attention]) == pytest.approx(0.010 * RATES.products / RATES.attention, rel=0.01)
