"""The clock's seconds by operator are all that kernels take."""

from __future__ import annotations

import pytest

from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.virtual_gpu.calls.kernel_kinds import KERNEL_KINDS
from lowmem_ft.virtual_gpu.calls.work import Work
from lowmem_ft.virtual_gpu.replay.timing.clock import Clock, kinds_of_work


def test_seconds_of_kernels_are_summed_by_their_operators_name():
    gpu = find_gpu("a100-80gb")
    product = Work("kernel", 0, name="mm", flops=10**12, dtype="bfloat16", num_bytes=10**6)
    repeated = Work(
        "kernel", 0, stream=1, name="mm", flops=10**12, dtype="bfloat16", num_bytes=10**6, times=3
    )
    sum_of_two = Work("kernel", 0, name="add", num_bytes=10**9)
    copy = Work("copy", 0, name="_to_copy", num_bytes=10**9)
    entries = [sum_of_two, product, repeated, copy, sum_of_two]
    clock = Clock(entries)
    times = clock.times_on(gpu)
    found = clock.seconds_by_operator(times, 1, len(entries))
    assert found.keys() == {"mm", "add"}
    assert found["mm"] == pytest.approx(4 * 10**12 / (gpu.dense_flops["bfloat16"] * gpu.rates.products))
    assert found["add"] == pytest.approx(10**9 / (gpu.bandwidth * gpu.rates.bandwidth))


def test_kinds_of_work_are_shares_of_the_time():
    gpu = find_gpu("a100-80gb")
    entries = [
        Work("kernel", 0, name="mm", flops=10**13, dtype="bfloat16"),
        Work("kernel", 0, name="_flash_attention_forward", flops=10**13, dtype="bfloat16"),
        Work("kernel", 0, name="convolution", flops=10**12, dtype="bfloat16"),
        Work("kernel", 0, name="add", num_bytes=10**10),
    ]
    clock = Clock(entries)
    times = clock.times_on(gpu)
    found = kinds_of_work(times.between(0, 4), clock.seconds_by_kind(times, 0, 4))
    each: dict[str, float] = dict(
        zip(("products", "attention", "dense convolutions", "element-wise"), times.computing, strict=True)
    )
    shares = {kind: share for kind, share in found.items() if share}
    assert shares == {kind: pytest.approx(each[kind] / sum(each.values()), rel=1e-3) for kind in each}
    assert found.keys() == {*KERNEL_KINDS, "host copies", "communication"}
