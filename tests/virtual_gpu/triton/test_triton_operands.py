"""What a Triton kernel reads and writes, found in its source; the kernels here are never compiled."""

from typing import Any

import pytest

from lowmem_ft.virtual_gpu.triton.triton_operands import operands_of_kernel


class Language:
    """Stands for ``triton.language``, of which only names matter."""

    __module__ = "triton"

    def __getattr__(self, name):
        return self


tl: Any = Language()
mystery: Any = None


class jitted:
    def __init__(self, fn):
        self.fn = fn


@jitted
def accumulate(into_ptr, value, off, ATOMIC):
    if ATOMIC:
        tl.atomic_add(into_ptr + off, value)
    else:
        tl.store(into_ptr + off, value)


@jitted
def offset(ptr, by):
    return ptr + by


def by_arithmetic(x_ptr, y_ptr, out_ptr, n, BLOCK):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    places = x_ptr + at
    for _ in range(n):
        value = tl.load(places) + tl.load(y_ptr + at)
        tl.store(out_ptr + at, value)
        places += BLOCK


def with_reused_names(x_ptr, y_ptr, out_ptr, n):
    place = x_ptr + 1
    value = tl.load(place)
    place = out_ptr + 1
    tl.store(place, value.to(place.dtype.element_ty))
    other = x_ptr
    for _ in range(n):
        value = tl.load(other)
        other = y_ptr
    if value:
        place = y_ptr
    tl.store(place, value)


def in_a_branch(x_ptr, y_ptr, GRADIENTS, MODE):
    value = tl.load(x_ptr)
    if GRADIENTS and MODE == "all":
        tl.store(x_ptr, value)
    elif y_ptr is not None:
        tl.store(y_ptr, value)


def by_other_functions(x_ptr, out_ptr, off, ATOMIC):
    accumulate(offset(out_ptr, off), tl.load(offset(x_ptr, off)), off, ATOMIC)


def by_blocks(x_ptr, out_ptr, descriptor):
    block = tl.make_block_ptr(
        base=x_ptr, shape=(1,), strides=(1,), offsets=(0,), block_shape=(1,), order=(0,)
    )
    place, _ = tl.advance(block, (1,)), 0
    out = tl.multiple_of(out_ptr if descriptor is None else out_ptr + 1, 16)
    tl.store(out, tl.load(place))
    descriptor.store([0], descriptor.load([0]))


def known_in_a_loop(x_ptr, out_ptr, n):
    current = x_ptr
    for _ in range(n):
        tl.store(current, tl.load(x_ptr))
        current = out_ptr


def passed_on(x_ptr, y_ptr):
    mystery(x_ptr)
    tl.store(y_ptr, 0)


@pytest.mark.parametrize(
    "kernel, pointers, constants, reads, writes",
    [
        (by_arithmetic, "x_ptr y_ptr out_ptr", {}, "x_ptr y_ptr", "out_ptr"),
        (with_reused_names, "x_ptr y_ptr out_ptr", {}, "x_ptr y_ptr", "out_ptr y_ptr"),
        (in_a_branch, "x_ptr y_ptr", {"GRADIENTS": True, "MODE": "all"}, "x_ptr", "x_ptr"),
        (in_a_branch, "x_ptr", {"GRADIENTS": False, "MODE": "all", "y_ptr": None}, "x_ptr", ""),
        (in_a_branch, "x_ptr y_ptr", {"GRADIENTS": True}, "x_ptr", "x_ptr y_ptr"),
        (by_other_functions, "x_ptr out_ptr", {"ATOMIC": True}, "x_ptr out_ptr", "out_ptr"),
        (by_other_functions, "x_ptr out_ptr", {"ATOMIC": False}, "x_ptr", "out_ptr"),
        (by_blocks, "x_ptr out_ptr descriptor", {}, "x_ptr descriptor", "out_ptr descriptor"),
        (known_in_a_loop, "x_ptr out_ptr", {}, "x_ptr", "x_ptr out_ptr"),
        (passed_on, "x_ptr y_ptr", {}, "x_ptr", "x_ptr y_ptr"),
        (eval("lambda x_ptr, y_ptr: None"), "x_ptr y_ptr", {}, "x_ptr y_ptr", "x_ptr y_ptr"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_loads_and_stores_are_followed_to_the_arguments(kernel, pointers, constants, reads, writes):
    found = operands_of_kernel(kernel, frozenset(pointers.split()), constants)
    assert (found.reads, found.writes) == (set(reads.split()), set(writes.split()))
