"""A kernel's rate by its kind and sizes: waves of tiles, keys of a query, shares of the bandwidth."""

import dataclasses

import pytest

from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.virtual_gpu.replay.timing.kernel_rates import arithmetic_rate, matmul_rate, traffic_rate

H200 = find_gpu("h200")


def share_of(shape, dtype="bfloat16"):
    return arithmetic_rate(H200, "products", dtype, shape) / matmul_rate(H200, dtype)


def test_a_product_of_whole_waves_and_a_long_inner_dimension_reaches_nearly_all():
    rows = 128 * H200.num_multiprocessors
    assert 0.98 < share_of((1, rows, 128, 65536)) < 1
    inner = H200.rates.inner_dimension
    assert share_of((1, rows, 128, inner)) == pytest.approx(0.5)


def test_a_last_wave_that_is_not_full_takes_as_long_as_one_that_is():
    full, one_more = (share_of((1, 128 * tiles, 4096, 255)) for tiles in (33, 34))
    assert one_more < full  # 32 columns of tiles: 8 waves, and 9 of which the last is nearly empty


def test_few_tiles_are_made_more_by_cutting_the_inner_dimension():
    cut, whole = (
        share_of((1, 512, 128, inner)) / inner * (inner + H200.rates.inner_dimension) for inner in (4096, 255)
    )
    assert cut > 2 * whole


def test_products_in_float32_and_of_unknown_sizes_take_the_rate_of_large_ones():
    assert arithmetic_rate(H200, "products", "float32", (1, 8, 8, 8)) == matmul_rate(H200, "float32")
    assert arithmetic_rate(H200, "products", "bfloat16", ()) == matmul_rate(H200, "bfloat16")


def test_float8_is_twice_as_fast_where_the_hardware_has_it():
    twice = matmul_rate(H200, "float8_e4m3fn") / H200.rates.float8_products
    assert twice == pytest.approx(2 * matmul_rate(H200, "bfloat16") / H200.rates.products)
    a100 = find_gpu("a100-80gb")
    assert matmul_rate(a100, "float8_e4m3fn") == matmul_rate(a100, "float32")


def test_attention_is_slower_with_few_keys_small_heads_and_few_blocks():
    def rate(kind, heads, queries, keys, head_dim):
        return arithmetic_rate(H200, kind, "bfloat16", (heads, queries, keys, head_dim))

    rates = H200.rates
    peak = H200.dense_flops["bfloat16"] * rates.attention
    many = rate("attention", 512, 4096, 2048, 128)
    assert many == pytest.approx(peak * 2048 / (2048 + rates.attention_keys))
    assert rate("attention", 512, 512, 256, 128) < many
    assert rate("attention", 512, 4096, 2048, 64) == pytest.approx(many * rates.small_heads)
    assert rate("attention", 1, 128, 2048, 128) == pytest.approx(many / H200.num_multiprocessors)
    assert rate("attention backward", 512, 4096, 10**9, 128) == pytest.approx(
        peak * rates.attention_backward, rel=1e-3
    )


def test_a_kind_reaches_its_share_of_the_bandwidth():
    slow = dataclasses.replace(H200, rates=dataclasses.replace(H200.rates, traffic={"updates": 0.25}))
    assert traffic_rate(slow, "element-wise") == H200.bandwidth * H200.rates.bandwidth
    assert traffic_rate(slow, "updates") == traffic_rate(slow, "element-wise") / 4
