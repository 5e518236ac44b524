"""Our Adafactor against transformers'."""

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor as TransformersAdafactor

from lowmem_ft.foundation.tensors.gradient_slice import GradientSlice
from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker
from lowmem_ft.optimizers.chunked.chunked_optimizer import ChunkedOptimizer
from lowmem_ft.optimizers.updates.adafactor import Adafactor

SHAPES = [(100, 37), (7,), (513,), (4, 10, 30), (1, 300), (300, 1)]
"""Matrices, vectors, and a stack of matrices as mixtures of experts have them."""


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("chunk_elements", [256, 1024, None])
def test_30_steps_are_those_of_transformers(chunk_elements, weight_decay):
    """To the rounding of float32 sums, which are made in another order."""
    starts = [torch.randn(shape) for shape in SHAPES]
    mine, theirs = ([nn.Parameter(start.clone()) for start in starts] for _ in range(2))
    hyperparameters = {"lr": 1e-2, "weight_decay": weight_decay}
    optimizer = ChunkedOptimizer(mine, Adafactor(), hyperparameters)
    optimizer.chunk_elements = chunk_elements
    reference = TransformersAdafactor(theirs, **hyperparameters, scale_parameter=False, relative_step=False)
    for step in range(30):
        for parameter, twin in zip(mine, theirs, strict=True):
            parameter.grad = torch.randn_like(parameter) * 10 ** (step % 5 - 2)  # some steps are clipped
            twin.grad = parameter.grad.clone()
        optimizer.step()
        reference.step()
    for parameter, twin in zip(mine, theirs, strict=True):
        torch.testing.assert_close(parameter.detach(), twin.detach(), rtol=1e-5, atol=1e-6)
        for name, value in reference.state[twin].items():
            if name.startswith("exp_avg"):
                own = optimizer.state[parameter][name]
                torch.testing.assert_close(own, value.view(-1), rtol=1e-5, atol=1e-7)


def test_a_matrix_keeps_a_row_and_a_column_and_nothing_is_made_as_large_as_it():
    parameter = nn.Parameter(torch.randn(2048, 512))
    optimizer = ChunkedOptimizer([parameter], Adafactor(), {"lr": 1e-2, "weight_decay": 0.1})
    optimizer.chunk_elements = 2**14
    parameter.grad = torch.randn_like(parameter)
    optimizer.allocate_state()
    tensors = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
    assert sum(tensor.numel() for tensor in tensors) == 2048 + 512
    with StorageTracker() as tracker:
        optimizer.step()
    assert tracker.peak_bytes < 4 * 4 * 2**14 + 4 * 4 * 2560


def test_a_part_of_a_parameter_cannot_be_updated_by_itself():
    parameter = nn.Parameter(torch.randn(20, 30))
    optimizer = ChunkedOptimizer([parameter], Adafactor(), {"lr": 1e-2, "weight_decay": 0.0})
    assert optimizer.slice_unit is None
    with pytest.raises(ValueError, match=r"multiples of 600 .* got 0 to 300"):
        optimizer.update([GradientSlice(parameter, torch.randn(10, 30))])
