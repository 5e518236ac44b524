"""Random bits by counter: the same for an element whatever the chunk, and as good as independent."""

import pytest
import torch

from lowmem_ft.optimizers.counter_random import CounterRandom, _hash32_, random_bits

CPU = torch.device("cpu")


def bits_of(random, num_bits, stream, num_elements):
    return random_bits(num_bits, random.key(stream), random.element, num_elements, CPU)


@pytest.mark.parametrize("num_bits", [8, 16])
@pytest.mark.parametrize("first,last", [(0, 1000), (1, 3), (513, 514), (255, 769), (998, 1000)])
def test_a_part_has_the_bits_it_has_in_the_whole(num_bits, first, last):
    whole = bits_of(CounterRandom(7, 3, 5), num_bits, 1, 1000)
    part = bits_of(CounterRandom(7, 3, 5, element=first), num_bits, 1, last - first)
    assert torch.equal(whole[first:last], part)


@pytest.mark.parametrize("num_bits", [8, 16])
def test_elements_beyond_32_bits_have_bits_too(num_bits):
    bits = bits_of(CounterRandom(7, 3, 5, element=2**33 + 5), num_bits, 1, 1000)
    assert bits.unique().numel() > (200 if num_bits == 8 else 900)


@pytest.mark.parametrize("num_bits", [8, 16])
@pytest.mark.parametrize("stream", [0, 1, 2])
def test_bits_are_uniform(num_bits, stream):
    """A chi-square test over 256 bins of a million draws each; 5 sigma."""
    num_elements = 2**20
    bits = bits_of(CounterRandom(0, 1, 0), num_bits, stream, num_elements)
    assert bits.dtype == torch.int32
    assert bits.min() >= 0
    assert bits.max() < 2**num_bits
    for byte in range(num_bits // 8):
        counts = torch.bincount((bits >> (8 * byte)) & 255, minlength=256).double()
        chi_square = ((counts - num_elements / 256) ** 2 / (num_elements / 256)).sum().item()
        assert abs(chi_square - 255) < 5 * (2 * 255) ** 0.5


OTHERS = {
    "seed": CounterRandom(1, 1, 0),
    "large seed": CounterRandom(2**32, 1, 0),
    "step": CounterRandom(0, 2, 0),
    "parameter": CounterRandom(0, 1, 1),
    "element": CounterRandom(0, 1, 0, element=4),
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_seed_step_parameter_or_element_gives_independent_bits(what):
    """The correlation of 2**18 pairs stays within 5 standard errors of zero."""
    num_elements = 2**18
    first = bits_of(CounterRandom(0, 1, 0), 16, 1, num_elements).double()
    second = bits_of(OTHERS[what], 16, 1, num_elements).double()
    correlation = torch.corrcoef(torch.stack((first, second)))[0, 1].item()
    assert abs(correlation) < 5 / num_elements**0.5


def test_streams_are_independent():
    first, second = (bits_of(CounterRandom(0, 1, 0), 16, stream, 2**18).double() for stream in (1, 2))
    assert abs(torch.corrcoef(torch.stack((first, second)))[0, 1].item()) < 5 / 2**9


def test_the_hash_is_lowbias32():
    """Values computed with the published C function."""
    words = torch.tensor([0, 1, 2, -1], dtype=torch.int32)

    def published(x):
        x ^= x >> 16
        x = x * 0x7FEB352D & 0xFFFFFFFF
        x ^= x >> 15
        x = x * 0x846CA68B & 0xFFFFFFFF
        return x ^ x >> 16

    expected = [published(word & 0xFFFFFFFF) for word in words.tolist()]
    assert [word & 0xFFFFFFFF for word in _hash32_(words).tolist()] == expected
