"""Master weights: exact where they say so, without bias where they round at random."""

import pytest
import torch

from lowmem_ft.optimizers.counter_random import CounterRandom
from lowmem_ft.optimizers.formats.master_formats import MASTER_FORMATS, master_format
from lowmem_ft.optimizers.table import MASTER_BYTES

NO_RANDOM = CounterRandom(0, 0, 0)


def kept_by(form, num_elements):
    return {name: torch.zeros(num_elements, dtype=dtype) for name, dtype in form.tensors.items()}


def written(name, value, random=NO_RANDOM):
    """The weight, what is kept beside it, and the value that both give back."""
    form = MASTER_FORMATS[name]
    weight, kept = torch.zeros(value.numel(), dtype=torch.bfloat16), kept_by(form, value.numel())
    form.write(value, weight, kept, random)
    return weight, kept, form.read(weight, kept)


def patterns(block):
    """The 2**20 float32 numbers of one of 4096 blocks of all bit patterns."""
    return torch.arange(2**20, dtype=torch.int32).add_(block * 2**20 - 2**31).view(torch.float32)


# Both zeros, subnormals, numbers about 1, the largest, infinities, NaNs, and 40 blocks in between.
BLOCKS = sorted({0, 1016, 1023, 2039, 2040, 2047, 2048, 3064, 3071, 4087, 4088, 4095, *range(11, 4096, 103)})


@pytest.mark.parametrize("block", BLOCKS)
def test_split16_gives_back_every_bit_pattern(block):
    value = patterns(block)
    weight, _, joined = written("split16", value)
    is_nan = value.isnan()
    assert torch.equal(joined[~is_nan].view(torch.int32), value[~is_nan].view(torch.int32))
    assert torch.equal(joined.isnan(), is_nan)
    # Inf and numbers that round to it are Inf in the model; NaNs are not finite, and those of arithmetic are NaN.
    assert not weight[is_nan].isfinite().any()
    quiet = is_nan & ((value.view(torch.int32) & 0x00400000) != 0)
    assert weight[quiet].isnan().all()
    assert torch.equal(weight[value.isinf()].float(), value[value.isinf()])


@pytest.mark.parametrize("block", BLOCKS)
def test_exact_formats_show_the_model_the_same_weight(block):
    value = patterns(block)
    weight, _, _ = written("fp32", value)
    other, _, _ = written("split16", value)
    assert torch.equal(weight.view(torch.int16), other.view(torch.int16))
    finite = value.isfinite()
    nearest = value.bfloat16()
    is_tie = (value.view(torch.int32) & 0xFFFF) == 0x8000  # away from zero here, to even there
    same = weight.view(torch.int16) == nearest.view(torch.int16)
    assert same[finite & ~is_tie].all()


@pytest.mark.parametrize("name", ["split24", "stochastic_rounding"])
@pytest.mark.parametrize("block", [1016, 2039, 2040, 2047, 4087, 4088, 4095])
def test_random_rounding_leaves_infinities_and_nans_alone(name, block):
    value = patterns(block)
    weight, _, joined = written(name, value, CounterRandom(1, 1, 1))
    assert joined[value.isnan()].isnan().all() or not joined[value.isnan()].isfinite().any()
    assert torch.equal(joined[value.isinf()], value[value.isinf()])
    quiet = value.isnan() & ((value.view(torch.int32) & 0x00400000) != 0)
    assert weight[quiet].isnan().all()
    finite = value.isfinite() & (value.abs() < 3e38)
    assert joined[finite].isfinite().all()


@pytest.mark.parametrize("name,bits_kept", [("split24", 24), ("stochastic_rounding", 16)])
def test_random_rounding_takes_a_neighbour(name, bits_kept):
    value = torch.randn(10_000) * torch.logspace(-30, 30, 10_000)
    _, _, joined = written(name, value, CounterRandom(3, 1, 4))
    unit = 2 ** (32 - bits_kept)
    difference = joined.view(torch.int32).long() - value.view(torch.int32).long()
    assert difference.abs().max() < unit
    assert (joined.view(torch.int32) % unit == 0).all()
    exact = (value.view(torch.int32) // unit * unit).view(torch.float32)
    _, _, again = written(name, exact, CounterRandom(3, 1, 4))
    assert torch.equal(again, exact)  # what needs no rounding is not moved


@pytest.mark.parametrize("name,bits_kept", [("split24", 24), ("stochastic_rounding", 16)])
def test_random_rounding_is_unbiased_within_5_sigma(name, bits_kept):
    """The mean error of n values rounded once each; one rounding errs by at most one unit, sigma below half of it."""
    num_elements = 2**20
    value = 1 + torch.rand(num_elements) * 0.99  # one unit for all
    unit = 2.0 ** (9 - bits_kept)
    _, _, joined = written(name, value, CounterRandom(9, 2, 0))
    share = ((value.double() - 1) / unit) % 1
    sigma = unit * (share * (1 - share)).sum().sqrt().item() / num_elements
    assert sigma > 0.3 * unit / num_elements**0.5
    assert abs((joined.double() - value.double()).mean().item()) < 5 * sigma


def test_float32_weights_need_nothing_beside_them():
    weight = torch.randn(10)
    for name in MASTER_FORMATS:
        form = master_format(name, torch.float32)
        assert not form.tensors
        assert form.read(weight, {}) is weight


@pytest.mark.parametrize("name", MASTER_FORMATS)
def test_bytes_beside_the_weight(name):
    """As plans and changes count them without torch."""
    assert sum(dtype.itemsize for dtype in MASTER_FORMATS[name].tensors.values()) == MASTER_BYTES[name]


def test_a_copy_of_a_weight_that_was_rounded_to_even_stays_a_copy():
    """As other engines round ties: their checkpoints have such pairs."""
    master = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8])
    assert torch.equal(MASTER_FORMATS["fp32"].read(master.bfloat16(), {"master": master}), master)
