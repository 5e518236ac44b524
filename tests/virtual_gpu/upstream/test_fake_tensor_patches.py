"""Tensors that are moved in place stay what they are: the same object, with its attributes and its hooks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.virtual_gpu.gpu import VirtualGPU

NUM_ELEMENTS = 2**18


@pytest.fixture
def gpu():
    with VirtualGPU("l4") as gpu:
        yield gpu


@pytest.fixture
def called():
    return []


@pytest.fixture
def parameter(gpu, called):
    """On the host, with a note and hooks on it."""
    parameter = nn.Parameter(torch.ones(NUM_ELEMENTS))
    parameter.note = "kept"
    parameter.register_hook(lambda gradient: called.append(gradient.device))
    parameter.register_post_accumulate_grad_hook(lambda tensor: called.append(tensor is parameter))
    return parameter


def move_by_data(parameter, device):
    parameter.data = parameter.data.to(device)


def move_by_module(parameter, device):
    module = nn.Module()
    module.weight = parameter
    module.to(device)
    assert module.weight is parameter


@pytest.mark.parametrize("move", [move_by_data, move_by_module])
def test_a_parameter_moves_with_its_notes_and_hooks(move, parameter, called, gpu):
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    assert torch.cuda.memory_allocated() == 0
    move(parameter, "cuda")
    assert parameter.device == gpu.device
    assert isinstance(parameter, nn.Parameter)
    assert parameter.requires_grad
    assert parameter.is_leaf
    assert parameter.note == "kept"
    assert torch.cuda.memory_allocated() == parameter.nbytes
    loss = (parameter * parameter).sum()
    loss.backward()
    optimizer.step()
    assert called == [gpu.device, True]
    assert parameter.grad.device == gpu.device
    parameter.grad = None
    del loss
    move(parameter, "cpu")
    assert parameter.device.type == "cpu"
    assert torch.cuda.memory_allocated() == 0


def test_data_may_be_of_another_shape_and_type(parameter, gpu):
    parameter.data = torch.zeros(7, 3, dtype=torch.bfloat16, device="cuda")
    assert (parameter.shape, parameter.dtype) == ((7, 3), torch.bfloat16)
    parameter.data = torch.zeros(2, device="cuda")
    assert parameter.shape == (2,)


def test_data_of_another_device_is_refused_where_a_graph_or_a_gradient_would_be_told_on_cuda(parameter):
    loss = (parameter * parameter).sum()
    with pytest.raises(UserError, match=r"got a graph or a view of it\. Delete what is left of the step"):
        move_by_data(parameter, "cuda")
    loss.backward()
    del loss
    with pytest.raises(UserError, match=r"got a gradient\. Delete what is left of the step"):
        move_by_data(parameter, "cuda")
    parameter.grad = None
    move_by_data(parameter, "cuda")


def test_tensors_that_a_program_swaps_swap_all_that_they_have(gpu):
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3, device="cuda"))
    first.note, second.note = "first", "second"
    torch.utils.swap_tensors(first, second)
    assert (first.shape, first.device, first.note) == ((3,), gpu.device, "second")
    assert (second.shape, second.note) == ((2,), "first")
