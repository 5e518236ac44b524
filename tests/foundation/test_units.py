import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    "text,num_bytes",
    [
        ("24GiB", 24 * 2**30),
        ("24GB", 24 * 10**9),
        ("1.5 MiB", 3 * 2**19),
        ("512B", 512),
        ("2kib", 2048),
    ],
)
def test_a_size_is_a_number_and_a_unit(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "0B", "24", "12 apples", "1e9", "24 Gi B"])
def test_anything_else_says_what_a_size_looks_like(text):
    with pytest.raises(UserError, match="24GiB"):
        parse_bytes(text)


@given(st.integers(1, 2**50))
def test_a_formatted_size_reads_back_to_within_its_digits(num_bytes):
    assert parse_bytes(format_bytes(num_bytes).replace(" ", "")) == pytest.approx(num_bytes, rel=0.006, abs=1)
