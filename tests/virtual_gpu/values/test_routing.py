"""The routing that a trace assumes: which experts tokens take, and what follows from it in loops over experts."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.values.constant_propagation import MOST_ELEMENTS, known_values
from lowmem_ft.virtual_gpu.values.routing import NUM_SMALL, picked

T, E, SIZE = 60, 6, 16


@pytest.mark.parametrize("num_picked", [1, 2, 3, E - 1, E])
@pytest.mark.parametrize("routing", ["balanced", "uneven"])
def test_a_token_takes_different_experts_and_all_experts_work(routing, num_picked):
    picked_TK = picked(torch.empty(T, E), num_picked, -1, routing)
    assert picked_TK.shape == (T, num_picked)
    assert all(len(set(of_token)) == num_picked for of_token in picked_TK.tolist())
    rows_E = torch.bincount(picked_TK.flatten(), minlength=E)
    assert len(rows_E) == E
    assert int(rows_E.min()) > 0
    if routing == "balanced":
        assert int(rows_E.max()) == T * num_picked // E


@pytest.mark.parametrize("num_picked", [2, 3])
def test_uneven_routing_sends_every_token_to_one_of_the_last_experts(num_picked):
    rows_E = torch.bincount(picked(torch.empty(T, E), num_picked, -1, "uneven").flatten()).tolist()
    large = E - 1 - NUM_SMALL
    assert rows_E[large] == T
    assert rows_E[large + 1 :] == [1] * NUM_SMALL


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
@pytest.mark.parametrize("num_picked", [1, 2, 3])
def test_few_tokens_can_be_routed(num_tokens, num_picked):
    picked_TK = picked(torch.empty(num_tokens, 4), num_picked, -1, "uneven")
    assert all(len(set(of_token)) == num_picked for of_token in picked_TK.tolist())
    assert int(picked_TK.max()) < 4


def test_experts_may_be_any_axis():
    assert torch.equal(picked(torch.empty(E, T), 2, 0, "uneven"), picked(torch.empty(T, E), 2, 1, "uneven").T)


class Loop(nn.Module):
    """Experts one after the other; finds their rows in one of the ways that programs know."""

    def __init__(self, rows, num_picked=2):
        super().__init__()
        self.router = nn.Linear(SIZE, E)
        self.experts = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(E))
        self.rows, self.num_picked = rows, num_picked
        self.computed = []

    def forward(self, x):
        scores, picked_TK = self.router(x).softmax(-1).topk(self.num_picked, dim=-1)
        self.computed = []
        result = torch.zeros_like(x)
        for expert, token in zip(self.experts, self.rows(picked_TK), strict=True):
            self.computed.append(len(token))
            result.index_add_(0, token, expert(x[token]))
        return result * scores.sum(-1, keepdim=True)


def by_where(picked_TK):
    return [torch.where(mask)[1] for mask in F.one_hot(picked_TK, E).permute(2, 1, 0)]


def by_nonzero(picked_TK):
    return [(picked_TK == e).any(-1).nonzero().flatten() for e in range(E)]


def by_mask(picked_TK):
    token_T = torch.arange(len(picked_TK), device=picked_TK.device)
    return [token_T[(picked_TK == e).any(-1)] for e in range(E)]


def by_counts(picked_TK):
    ones_TE = torch.zeros(len(picked_TK), E, device=picked_TK.device).scatter(1, picked_TK, 1)
    order = picked_TK.flatten().argsort() // picked_TK.shape[1]
    return order.split(ones_TE.long().sum(0).tolist())


def by_bincount(picked_TK):
    order = picked_TK.flatten().argsort() // picked_TK.shape[1]
    return order.split(torch.bincount(picked_TK.flatten(), minlength=E).tolist())


@pytest.mark.parametrize("routing", ["balanced", "uneven"])
@pytest.mark.parametrize("rows", [by_where, by_nonzero, by_mask, by_counts, by_bincount])
def test_loops_over_experts_compute_as_many_rows_as_tokens_take(rows, routing):
    with VirtualGPU("t4", routing=routing) as gpu:
        model = gpu.place(Loop(rows))
        model(torch.zeros(T, SIZE, device=gpu.device)).sum().backward()
    assert sum(model.computed) == 2 * T
    assert max(model.computed) == (T if routing == "uneven" else 2 * T // E)
    trace = gpu.trace()
    assert trace.does_routing_decide
    assert not trace.assumed_largest


def test_a_mask_of_many_experts_is_known_beyond_the_size_of_other_masks():
    num_tokens = MOST_ELEMENTS // E
    with VirtualGPU("t4") as gpu:
        model = gpu.place(Loop(by_where))
        model(torch.zeros(num_tokens, SIZE, device=gpu.device))
    assert sum(model.computed) == 2 * num_tokens


def test_nothing_is_assumed_outside_a_forward_or_of_numbers_changed_in_place():
    class Changed(nn.Module):
        def forward(self, x):
            ones = torch.zeros(T, E, device=x.device).scatter(1, x.topk(2).indices, 1)
            assert known_values(ones) is not None
            return ones.mul_(x)

    with VirtualGPU("t4") as gpu:
        x = torch.zeros(T, E, device=gpu.device)
        assert known_values(x.topk(2).indices) is None
        assert known_values(Changed()(x)) is None
    assert not gpu.trace().does_routing_decide
