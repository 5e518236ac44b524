"""Several processes that sum gradients of bfloat16 weights in float32 train as one does."""

from __future__ import annotations

import pytest
import torch
from accelerate import PartialState
from torch import nn

from lowmem_ft.techniques.accumulation.float32_accumulation import enable_float32_accumulation
from lowmem_ft.training.processes.gradient_averaging import average_gradients
from lowmem_ft.training.run.loop import train

SHORT = ("training.max_steps=4", "training.eval_steps=null", "training.save_steps=null")


@pytest.mark.parametrize(
    "optimizer",
    [("optimizer.master=split24", "optimizer.state=8bit"), ("optimizer.name=adamw_bnb_8bit",)],
    ids=["takes float32", "takes the weights' type"],
)
def test_two_processes_that_accumulate_equal_one(tiny, metrics, tmp_path, forks, optimizer):
    one, two = tmp_path / "one", tmp_path / "two"
    settings = (*SHORT, "model.dtype=bfloat16", *optimizer)
    train(tiny(*settings, "training.gradient_accumulation_steps=4", output_dir=one))
    half = [*settings, "training.gradient_accumulation_steps=2", "training.use_cpu=true"]
    source = "import sys; from lowmem_ft.cli.commands.train import main; sys.exit(main())"
    for process in forks.run_two(
        source, "recipe=tiny", "budget.preflight=false", *half, f"training.output_dir={two}"
    ):
        assert process.returncode == 0, process.stderr
    assert metrics(two, "tokens") == metrics(one, "tokens")
    # The same gradients of micro-batches, added in another order: in bfloat16 the norms would differ by 1e-3.
    assert metrics(two, "grad_norm")[0] == pytest.approx(metrics(one, "grad_norm")[0], rel=1e-6)
    assert metrics(two) == pytest.approx(metrics(one), rel=1e-4)


class Branches(nn.Module):
    """Three weights, of which each process uses others."""

    def __init__(self):
        super().__init__()
        self.both, self.second, self.neither = (
            nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in "123"
        )

    def forward(self, rank):
        return (self.both * (rank + 1)).sum() + (self.second.sum() * 257 if rank == 1 else 0)


def averaged():
    rank = PartialState(cpu=True).process_index
    model = Branches()
    enable_float32_accumulation(torch.optim.SGD(model.parameters()), takes_float32=True)
    model(rank).backward()
    average_gradients(model.parameters())
    assert model.both.grad.dtype == torch.float32
    assert model.both.grad.tolist() == [1.5] * 3
    assert model.second.grad.tolist() == [128.0] * 3  # 257 is 256 in bfloat16
    assert model.neither.grad is None


def test_a_parameter_that_one_process_did_not_use_counts_as_zero_there(forks):
    for process in forks.run_two(f"import runpy; runpy.run_path({__file__!r})['averaged']()"):
        assert process.returncode == 0, process.stderr
