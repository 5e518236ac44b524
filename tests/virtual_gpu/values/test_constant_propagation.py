"""Small integers from the host keep their values; what is unknown has the largest size and reads as zero."""

from __future__ import annotations

import pytest
import torch

from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.values.constant_propagation import MOST_ELEMENTS, known_values


@pytest.fixture(autouse=True)
def gpu():
    with VirtualGPU("t4") as gpu:
        yield gpu


def test_masks_and_positions_are_computed():
    mask_BT = torch.tensor([[1, 1, 0], [1, 1, 1]]).cuda()
    position_ids_BT = mask_BT.cumsum(-1) - 1
    assert position_ids_BT.tolist() == [[0, 1, 1], [0, 1, 2]]
    assert not mask_BT.bool().all().item()
    assert mask_BT.sum(-1).max().item() == 3


def test_where_packed_documents_begin_is_known():
    position_ids_T = torch.tensor([0, 1, 2, 0, 1, 0]).cuda()
    starts = (position_ids_T == 0).nonzero().flatten()
    assert starts.tolist() == [0, 3, 5]
    assert torch.diff(torch.cat([starts, torch.tensor([6], device="cuda")])).max().item() == 3


def test_a_known_mask_picks_as_many_elements_as_it_has_and_an_unknown_one_all(gpu):
    hidden_TD = torch.randn(6, 4, device="cuda")
    learnt_T = torch.tensor([True, False, True, True, False, False]).cuda()
    assert hidden_TD[learnt_T].shape == (3, 4)
    assert not gpu.recorder.largest_assumed
    assert hidden_TD[hidden_TD[:, 0] > 0].shape == (6, 4)
    assert (hidden_TD > 0).nonzero().shape == (24, 2)
    assert hidden_TD.masked_select(hidden_TD > 0).shape == (24,)
    assert hidden_TD.unique().shape == (24,)
    assert gpu.recorder.largest_assumed == {
        "aten.index.Tensor",
        "aten.nonzero.default",
        "aten.masked_select.default",
        "aten._unique2.default",
    }


def test_values_in_place_change_and_become_unknown():
    ids = torch.tensor([1, 2]).cuda()
    ids += 1
    assert ids.tolist() == [2, 3]
    ids.copy_(torch.randn(2).cuda().long())
    assert known_values(ids) is None
    assert ids.tolist() == [1, 1]


def test_unknown_values_read_as_zero_and_false():
    hidden_D = torch.randn(3, device="cuda")
    assert hidden_D.sum().item() == 0.0
    assert not hidden_D.isnan().any()
    assert f"{hidden_D.mean():.2f}" == "0.00"


def test_values_of_large_tensors_are_not_computed():
    assert known_values(torch.zeros(MOST_ELEMENTS + 1, dtype=torch.long)) is None
    assert known_values(torch.zeros(MOST_ELEMENTS, dtype=torch.long)) is not None


def test_a_size_without_a_bound_is_refused_by_name():
    with pytest.raises(ModelError, match=r"calls aten.bincount.default, whose result depends on values"):
        torch.bincount((torch.randn(4, device="cuda") > 0).long())


def test_numbers_that_are_counted_up_together_are_known():
    """As the step counters of optimizers that update many tensors at once."""
    with torch.no_grad():
        steps = [torch.tensor(0.0), torch.tensor(2.0)]
        torch._foreach_add_(steps, 1)
    assert [step.item() for step in steps] == [1.0, 3.0]


def test_numbers_that_something_unknown_is_added_to_are_unknown():
    steps = [torch.tensor(5.0)]
    torch._foreach_add_(steps, [torch.rand(8).sum()])
    assert known_values(steps[0]) is None
