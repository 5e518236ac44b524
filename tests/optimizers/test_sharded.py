"""Our optimizers on what ``fully_shard`` leaves in each process, over gloo: the weights that one process would have."""

from __future__ import annotations

import json
import re

import pytest
import torch
from roundings import LOSS

from lowmem_ft.optimizers.formats.operators import BLOCK

FORMATS = {
    "float32": ("float32", "fp32", "fp32"),
    "float32-bf16": ("float32", "fp32", "bf16"),
    "fp32": ("bfloat16", "fp32", "fp32"),
    "split16": ("bfloat16", "split16", "fp32"),
    "split24-bf16": ("bfloat16", "split24", "bf16"),
    "stochastic": ("bfloat16", "stochastic_rounding", "fp32"),
    "split24-8bit": ("bfloat16", "split24", "8bit"),
}
"""The type of weights, what is kept beside them, and the format of the averages."""

UPDATES = """
import json, sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from lowmem_ft.optimizers import OptimizerConfig, create_optimizer
from lowmem_ft.techniques.gradients.norm import clip_grad_norm

folder, formats = sys.argv[1], json.loads(sys.argv[2])
dist.init_process_group("gloo")
world = dist.get_world_size()
mesh = init_device_mesh("cpu", (world,))

class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        # Rows that nobody divides, of whole 8-bit blocks; a norm; fewer rows than processes; one number.
        shapes = [(37, 256), (576,), (3, 512), (1,)]
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)

def run(dtype, master, state):
    torch.manual_seed(0)
    model = Weights().to(getattr(torch, dtype))
    gradients = [[torch.randn_like(p) for p in model.parameters()] for _ in range(3)]
    if world > 1:
        fully_shard(model, mesh=mesh)
    config = OptimizerConfig(weight_decay=0.1, master=master, state=state)
    optimizer = create_optimizer(model, config, learning_rate=1e-2, seed=7)
    optimizer.chunk_elements = 1024
    norms = []
    for step in gradients:
        for p, whole in zip(model.parameters(), step):
            p.grad = whole.clone() if world == 1 else distribute_tensor(whole, mesh, p.placements)
        norms.append(clip_grad_norm(model.parameters(), float("inf")))
        optimizer.step()
    steps = [optimizer.state[p]["step"] for p in model.parameters()]
    full = [p.detach() if world == 1 else p.full_tensor().detach() for p in model.parameters()]
    kept = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    local = sum(tensor.nbytes for tensor in kept)
    return full, [float(norm) for norm in norms], steps, local

results = {name: run(*formats[name]) for name in formats}
torch.save(results, f"{folder}/{world}-{dist.get_rank()}.pt")
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def updated(forks, tmp_path_factory):
    """By number of processes, what each of them has after three steps with the same gradients."""
    folder = tmp_path_factory.mktemp("updated")
    for world in (1, 2, 3, 4):
        for done in forks.run_several(world, UPDATES, str(folder), json.dumps(FORMATS)):
            assert done.returncode == 0, done.stderr
    return {
        world: [torch.load(folder / f"{world}-{rank}.pt") for rank in range(world)] for world in (1, 2, 3, 4)
    }


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_shards_are_updated_to_the_bit_as_whole_parameters_are(updated, world, name):
    """What is rounded at random too: the bits go by the number of an element in the whole parameter."""
    alone, *_ = updated[1][0][name]
    for each in updated[world]:
        weights, _, steps, _ = each[name]
        assert steps == [3] * len(weights)  # of a parameter that has no rows here as well
        for one, other in zip(alone, weights, strict=True):
            if FORMATS[name][-1] == "8bit" and one.numel() % BLOCK and one.numel() > BLOCK:
                # Blocks begin anew in each process: one weight in nine ends a bfloat16 unit higher or lower, or, near
                # zero, by a part of what three steps of 0.01 moved it.
                torch.testing.assert_close(one, other, rtol=2**-7, atol=0.003)
                assert (one != other).float().mean() < 0.15
            else:
                assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["float32", "split16"])
def test_every_process_gets_the_norm_of_all(updated, name):
    _, alone, _, _ = updated[1][0][name]
    for world in (2, 3, 4):
        norms = [each[name][1] for each in updated[world]]
        assert all(norm == norms[0] for norm in norms)
        assert norms[0] == pytest.approx(alone, rel=4 * LOSS)  # a sum of some 2**14 squares


def test_state_is_shared_out(updated):
    _, _, _, alone = updated[1][0]["split24-8bit"]
    for world in (2, 3, 4):
        held = [each["split24-8bit"][3] for each in updated[world]]
        assert sum(held) == pytest.approx(alone, rel=0.01)
        assert max(held) < alone / world * 1.25  # ten rows of 37, and one of three of 512


REFUSALS = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from lowmem_ft.optimizers import OptimizerConfig, create_optimizer

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (1,))

def refused(model, before=lambda model: None, **config):
    try:
        optimizer = create_optimizer(model, OptimizerConfig(**config), learning_rate=1.0)
        before(model)
        [group] = optimizer.param_groups
        group["params"] = list(model.parameters())  # as engines do that shard later
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    except ValueError as error:
        print(error)

def sharded():
    return fully_shard(nn.Linear(4, 4, bias=False), mesh=mesh)

refused(sharded(), name="adafactor")
refused(nn.Linear(4, 4, bias=False), lambda model: fully_shard(model, mesh=mesh))
by_columns = nn.Linear(4, 4, bias=False)
by_columns.weight = nn.Parameter(distribute_tensor(by_columns.weight, mesh, [Shard(1)]))
refused(by_columns)
dist.destroy_process_group()
"""


def test_what_cannot_be_updated_by_shards_says_why(forks):
    [done] = forks.run_several(1, REFUSALS)
    assert done.returncode == 0, done.stderr
    adafactor, made_before, columns = done.stdout.splitlines()
    assert re.search(r"Adafactor measures whole parameters, got one of shape \(4, 4\).*Use AdamW", adafactor)
    assert "Create it after fully_shard" in made_before
    assert "got (Shard(dim=1),)" in columns
