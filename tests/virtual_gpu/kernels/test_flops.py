"""Operations are counted as torch's own counter does, or by hand where it errs; views cost nothing."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lowmem_ft.virtual_gpu.costs.flops import flops_of, is_free

aten = torch.ops.aten


class Counter(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.flops += flops_of(func, args, kwargs, result)
        return result


def program(x):
    """Each operator with a product, forward and backward."""
    layer = torch.nn.Linear(8, 6)
    batched = torch.bmm(x, x.mT)
    summed = torch.baddbmm(batched, x, x.mT)
    convolved = F.conv1d(x, torch.randn(3, x.shape[1], 2, requires_grad=True))
    return layer(x).sum() + summed.sum() + convolved.sum() + torch.einsum("bij,bkj->bik", x, x).sum()


def test_agrees_with_torchs_counter():
    x = torch.randn(4, 5, 8, requires_grad=True)
    with FlopCounterMode(display=False) as torchs:
        program(x).backward()
    with Counter() as ours:
        program(x).backward()
    assert ours.flops == torchs.get_total_flops() > 0


@pytest.mark.parametrize(
    "call, expected",
    [
        (lambda: aten.addmm_(t(3, 5), t(3, 4), t(4, 5)), 2 * 3 * 4 * 5),
        (lambda: aten.mv(t(3, 4), t(4)), 2 * 3 * 4),
        (lambda: aten.addbmm(t(3, 5), t(2, 3, 4), t(2, 4, 5)), 2 * 2 * 3 * 4 * 5),
        (lambda: grouped_mm((16, 8), (2, 8, 32)), 2 * 16 * 8 * 32),
        (lambda: grouped_mm((8, 16), (16, 32)), 2 * 16 * 8 * 32),
        (lambda: aten.mul(t(3), t(3)), 0),
    ],
)
def test_counts_products_that_torchs_counter_does_not_know(call, expected):
    with Counter() as counter:
        call()
    assert counter.flops == expected


@pytest.mark.parametrize("is_causal, half", [(False, 1), (True, 2)])
def test_attention_counts_two_products_forward_and_five_backward(is_causal, half):
    """Batch 2, 4 heads, 2 of keys, 16 queries and keys of 8 dimensions."""
    query, key = t(2, 4, 16, 8), t(2, 2, 16, 8)
    product = 2 * (2 * 4 * 16 * 8) * 16
    forward = aten._scaled_dot_product_flash_attention.default
    assert flops_of(forward, (query, key, key, 0.0, is_causal), {}, None) == 2 * product // half
    efficient = aten._scaled_dot_product_efficient_attention.default
    assert flops_of(efficient, (query, key, key, None, True, 0.0, is_causal), {}, None) == 2 * product // half
    backward = aten._scaled_dot_product_flash_attention_backward.default
    saved = (query, query, key, key, query, t(2, 4, 16), None, None, 16, 16, 0.0, is_causal, None, None)
    assert flops_of(backward, saved, {}, None) == 5 * product // half


def test_attention_over_packed_sequences_counts_the_longest():
    """40 tokens in sequences of at most 16: more than the work that the lengths, which are values, would give."""
    query = t(40, 4, 8)
    args = (query, query, query, offsets(0, 16, 32, 40), offsets(0, 16, 32, 40), 16, 16, 0.0, False, False)
    assert flops_of(aten._flash_attention_forward.default, args, {}, None) == 2 * 2 * (40 * 4 * 8) * 16


@pytest.mark.parametrize(
    "func, free",
    [
        (aten.view.default, True),
        (aten.t.default, True),
        (aten.split.Tensor, True),
        (aten.detach.default, True),
        (aten._unsafe_view.default, True),
        (aten.empty.memory_format, True),
        (aten.new_empty_strided.default, True),
        (aten.is_same_size.default, True),
        (aten.zeros_like.default, False),
        (aten.clone.default, False),
        (aten.copy_.default, False),
        (aten.add_.Tensor, False),
        (aten._fused_adamw_.default, False),
        (aten._foreach_add_.Scalar, False),
        (aten.native_dropout.default, False),
    ],
)
def test_only_what_launches_no_kernel_is_free(func, free):
    assert is_free(func) is free


def t(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype)


def offsets(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def grouped_mm(left: tuple[int, ...], right: tuple[int, ...]) -> torch.Tensor:
    return aten._grouped_mm(t(*left, dtype=torch.bfloat16), t(*right, dtype=torch.bfloat16), offsets(4, 16))
