"""Our SGD against torch's."""

import pytest
import torch
from torch import nn

from lowmem_ft.optimizers.chunked.chunked_optimizer import ChunkedOptimizer
from lowmem_ft.optimizers.updates.sgd import SGD


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_30_steps_are_torchs_bit_for_bit(momentum, weight_decay):
    hyperparameters = {"lr": 0.01, "momentum": momentum, "weight_decay": weight_decay}
    starts = [torch.randn(shape) for shape in ((100, 37), (7,), (513,))]
    mine, theirs = ([nn.Parameter(start.clone()) for start in starts] for _ in range(2))
    optimizer = ChunkedOptimizer(mine, SGD(), hyperparameters)
    optimizer.chunk_elements = 256
    reference = torch.optim.SGD(theirs, **hyperparameters, foreach=False, fused=False)
    for _ in range(30):
        for parameter, twin in zip(mine, theirs, strict=True):
            parameter.grad = torch.randn_like(parameter)
            twin.grad = parameter.grad.clone()
        optimizer.step()
        reference.step()
    assert all(torch.equal(parameter, twin) for parameter, twin in zip(mine, theirs, strict=True))


def test_without_momentum_there_is_no_state():
    parameter = nn.Parameter(torch.zeros(10))
    optimizer = ChunkedOptimizer([parameter], SGD(), {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0})
    optimizer.allocate_state()
    assert optimizer.state[parameter] == {"step": 0}
