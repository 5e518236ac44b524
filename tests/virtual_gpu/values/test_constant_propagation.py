"""Small integers from the host keep their values; what is unknown has the largest size and reads as zero."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

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


def test_numbers_of_data_are_known_up_to_the_first_weight():
    pixels_BP = torch.from_numpy(np.array([[0.0, 0.0], [0.5, 0.0]], dtype=np.float32)).cuda()
    is_padding_B = (pixels_BP.bfloat16() == 0).all(-1)
    assert pixels_BP[~is_padding_B].shape == (1, 2)
    assert known_values(pixels_BP @ torch.randn(2, 2, device="cuda")) is None
    assert known_values(torch.randn_like(pixels_BP)) is None


def test_numbers_that_follow_from_integers_are_known_and_buffers_for_others_are_not():
    places_T = torch.tensor([0, 1, 1]).cuda()
    weights_TN = torch.nn.functional.one_hot(places_T, 4).float() / 2
    assert (weights_TN == 0).all(0).tolist() == [False, False, True, True]
    assert known_values(torch.zeros_like(weights_TN)) is None


def test_values_of_large_data_are_computed_as_long_as_they_are_no_more():
    pixels = torch.from_numpy(np.zeros((2, MOST_ELEMENTS), dtype=np.float32)).cuda()
    assert (pixels == 0).sum().item() == 2 * MOST_ELEMENTS
    assert known_values(torch.cat([pixels, pixels])) is None


def test_a_tensor_of_numbers_on_the_device_has_their_values_and_type():
    length = torch.tensor([4, 2]).cuda().max()
    lengths = torch.tensor([length, 3], device="cuda")
    assert (lengths.tolist(), lengths.dtype, lengths.device) == ([4, 3], torch.int64, length.device)
    assert torch.tensor([length.half(), length]).dtype == torch.float16
    assert torch.as_tensor([length, 0.5]).tolist() == [4.0, 0.5]
    assert length.new_tensor([[length], [length + 1]]).tolist() == [[4], [5]]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_whatever_a_data_loader_computes_is_known(num_workers):
    def padded(rows):
        pixels = torch.zeros(len(rows), 3, 2**18)  # more than MOST_ELEMENTS
        for at, row in enumerate(rows):
            pixels[at, :row] = 1 + torch.rand(row, 2**18)
        return pixels

    lengths: Any = [1, 3, 2]
    loader = DataLoader(lengths, 3, collate_fn=padded, num_workers=num_workers)
    pixels = next(iter(loader)).cuda()
    assert (pixels == 0).all(-1).sum(-1).tolist() == [2, 0, 1]
    assert known_values(torch.zeros(2)) is None
