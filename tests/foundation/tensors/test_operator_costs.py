"""An operator of one's own on a virtual GPU: what is said of its cost is what the trace counts."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import register_flop_formula

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.virtual_gpu import VirtualGPU, register_operator_cost

ROWS, WIDTH = 256, 512
INPUT_BYTES = ROWS * WIDTH * 4


@pytest.fixture
def twice():
    """An operator ``tests_of_costs::twice`` that nobody knows more of than its shape."""
    library = torch.library.Library("tests_of_costs", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    torch.library.register_fake("tests_of_costs::twice", torch.empty_like, lib=library)
    yield torch.ops.tests_of_costs.twice.default
    library._destroy()


def traced(operator):
    """Bytes taken at the most beside the input, the bytes moved, and the operations of one call."""
    gpu = VirtualGPU("a100-80gb")
    with gpu:
        x = torch.empty(ROWS, WIDTH, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        operator(x)
        taken = torch.cuda.max_memory_allocated() - x.nbytes
    (work,) = [work for work in gpu.work.entries if work.name == "twice"]
    return taken, work.num_bytes, work.flops


def test_an_operator_is_one_kernel_until_its_cost_is_registered(twice):
    assert traced(twice) == (INPUT_BYTES, 2 * INPUT_BYTES, 0)
    register_operator_cost(
        twice, moved_bytes=lambda x: 7 * x.nbytes, temporary_bytes=lambda x: x.size(0) * 1024
    )
    register_flop_formula(twice.overloadpacket)(lambda shape, out_shape=None, **others: shape[0] * 1000)
    assert traced(twice) == (INPUT_BYTES + ROWS * 1024, 7 * INPUT_BYTES, ROWS * 1000)
    register_operator_cost(twice, moved_bytes=lambda x: 3 * x.nbytes)
    assert traced(twice)[:2] == (INPUT_BYTES, 3 * INPUT_BYTES)


def test_a_cost_belongs_to_one_overload(twice):
    with pytest.raises(UserError, match="belongs to one overload"):
        register_operator_cost(twice.overloadpacket, moved_bytes=lambda x: 0)
