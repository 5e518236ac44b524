"""Running averages in bfloat16 and 8 bits: how far off, without bias, never zero where it is divided by."""

import pytest
import torch

from lowmem_ft.optimizers.counter_random import CounterRandom
from lowmem_ft.optimizers.formats.operators import BLOCK
from lowmem_ft.optimizers.formats.state_formats import state_format

RANDOM = CounterRandom(1, 2, 3)


def zeros(form, num_elements):
    tensors = form.tensors("x", num_elements).items()
    return {key: torch.zeros(length, dtype=dtype) for key, (length, dtype) in tensors}


def round_trip(form, value, random=RANDOM):
    kept = zeros(form, value.numel())
    form.write(value, kept, "x", random, 1)
    return form.read(kept, "x", value.numel())


def values(signed, num_elements=20_000, seed=0):
    """Ten orders of magnitude within each block."""
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(num_elements, generator=generator) * 10 ** (
        10 * torch.rand(num_elements, generator=generator) - 12
    )
    return value if signed else value.square()


@pytest.mark.parametrize("num_elements", [20_000, 256, 255, 257, 1, 100])
@pytest.mark.parametrize("signed", [True, False])
def test_8_bit_values_are_off_by_an_eighth_at_most(signed, num_elements):
    form = state_format("8bit", signed=signed)
    value = values(signed, num_elements)
    kept = round_trip(form, value)
    scale = torch.cat([block.abs().amax().expand(block.numel()) for block in value.split(BLOCK)])
    bound = (value.abs() + form.floor * scale) / 8
    assert ((kept - value).abs() <= bound * (1 + 1e-6)).all()
    assert (kept.sign() * value.sign() >= 0).all()
    largest = value.abs() == scale
    torch.testing.assert_close(kept[largest], value[largest], rtol=2.0**-14, atol=0)


def test_8_bit_second_moments_never_become_zero():
    """Thirty orders of magnitude below the largest of their block, and zero itself beside others."""
    value = torch.full((3 * BLOCK,), 1e-30)
    value[::BLOCK] = 1.0
    value[5] = 0.0
    kept = round_trip(state_format("8bit", signed=False), value)
    assert (kept > 0).all()
    assert (kept[1:BLOCK] <= 2.0**-33).all()
    assert (round_trip(state_format("8bit", signed=False), torch.zeros(BLOCK)) == 0).all()


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-30, 1e30, 3e38])
@pytest.mark.parametrize("signed", [True, False])
def test_8_bit_blocks_of_any_size_stay_finite(signed, scale):
    value = torch.linspace(0.1, 1, BLOCK) * scale
    kept = round_trip(state_format("8bit", signed=signed), value)
    assert kept.isfinite().all()
    if scale > 1e-38:
        torch.testing.assert_close(kept, value, rtol=0.126, atol=0)


@pytest.mark.parametrize("name,signed", [("8bit", True), ("8bit", False), ("bf16", True), ("bf16", False)])
def test_rounding_is_unbiased_within_5_sigma(name, signed):
    """Each value written 4000 times; the mean of all errors, in units of their own standard error."""
    form = state_format(name, signed=signed)
    value = values(signed, 2 * BLOCK, seed=1).clamp(-1e3, 1e3)
    value = torch.where(value.abs() < 1e-6 * value.abs().max(), 1e-6 * value.abs().max(), value)
    rounded = torch.stack(
        [round_trip(form, value, CounterRandom(4, step, 0)) for step in range(4000)]
    ).double()
    error = rounded - value.double()
    sigma = error.std(0) / 4000**0.5
    moved = sigma > 0
    assert moved.sum() > 400
    assert (error.mean(0)[moved] / sigma[moved]).abs().max() < 5.5  # of 500 means
    assert abs((error.mean(0)[moved] / sigma[moved]).mean().item()) < 5 / moved.sum().item() ** 0.5


def test_float32_state_is_read_in_place():
    form = state_format("fp32", signed=True)
    kept = zeros(form, 10)
    assert form.read(kept, "x", 10) is kept["x"]
