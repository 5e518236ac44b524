"""Tensors whose storage, values or whole self is exchanged under them, as Lightning, torchmetrics and others do."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from lowmem_ft import VirtualGPU
from lowmem_ft.foundation.errors import UserError


@pytest.fixture
def gpu():
    with VirtualGPU("rtx-4090") as gpu:
        yield gpu


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("values", [0.0, 3, [1, 2, 3]])
def test_a_deep_copy_has_the_same_values_in_memory_of_its_own(gpu, device, values):
    one = torch.tensor(values, device=device)
    other = copy.deepcopy({"default": one})["default"]
    assert other.tolist() == one.tolist() == values
    assert gpu.recorder.index_of(other) not in (None, gpu.recorder.index_of(one))
    one += 1
    assert other.tolist() == values
    assert (one + other).device == one.device  # both are of this machine


def test_a_module_that_is_copied_takes_as_much_again(gpu):
    layer = nn.BatchNorm1d(256, device="cuda")
    before = gpu.recorder.live_bytes
    other = copy.deepcopy(layer)
    assert gpu.recorder.live_bytes == 2 * before
    other(torch.zeros(4, 256, device="cuda"))
    assert (other.num_batches_tracked.item(), layer.num_batches_tracked.item()) == (1, 0)


def test_the_values_of_a_tensor_go_with_its_data(gpu):
    one, other = torch.tensor([1, 2]), torch.tensor([3, 4, 5])
    one.data = other
    assert one.tolist() == [3, 4, 5]
    one.data = torch.rand(3).argsort()  # of which nobody knows the values
    assert one.tolist() != [3, 4, 5]


def test_a_storage_under_another_tensor_is_counted_once(gpu):
    one, other = (torch.zeros(1024, dtype=torch.int64, device="cuda") for _ in range(2))
    one.set_(other.untyped_storage())
    assert gpu.recorder.live_bytes == other.nbytes
    assert torch.utils.swap_tensors(one, torch.zeros(4, device="cuda")) is None
    assert one.shape == (4,)


def elsewhere(numel):
    """As another thread makes them, in which nothing is traced."""
    with _disable_current_modes():
        return torch.zeros(numel)


NOT_FOLLOWED = {
    "set_": lambda: torch.zeros(300).set_(torch.UntypedStorage(1200)),  # type: ignore[call-overload]
    "copy_": lambda: torch.UntypedStorage(1200).copy_(torch.zeros(300).untyped_storage()),
    "cpu": lambda: torch.zeros(300).untyped_storage().cpu(),
    "fake.data = real": lambda: setattr(torch.zeros(3), "data", elsewhere(3)),
    "real.data = fake": lambda: setattr(elsewhere(3), "data", torch.zeros(3)),
}


@pytest.mark.parametrize("name", NOT_FOLLOWED)
def test_memory_with_values_never_meets_tensors_without(gpu, name):
    with pytest.raises(UserError, match=r"follows storages that its tensors have.*Make a tensor"):
        NOT_FOLLOWED[name]()


def test_a_closure_is_a_forward_and_a_backward_pass_within_the_step():
    """``optimizer.step(closure)``, as Lightning calls it, is accounted as the loop that it stands for."""

    def peak(uses_closure):
        with VirtualGPU("rtx-4090") as gpu:
            layer = nn.Linear(256, 256, device="cuda")
            optimizer = torch.optim.AdamW(layer.parameters())

            def closure():
                optimizer.zero_grad()
                layer(torch.randn(4096, 256, device="cuda")).square().sum().backward()

            for _ in range(2):
                if uses_closure:
                    optimizer.step(closure)
                else:
                    closure()
                    optimizer.step()
        return gpu.report().by_category_at_peak

    assert peak(uses_closure=True) == peak(uses_closure=False)
