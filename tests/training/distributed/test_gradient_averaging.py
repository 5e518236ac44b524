"""Several processes that sum gradients of bfloat16 weights in float32 train as one does."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
from accelerate import PartialState
from torch import distributed as dist
from torch import nn

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.techniques.accumulation.float32_accumulation import enable_float32_accumulation
from lowmem_ft.training.processes import gradient_averaging
from lowmem_ft.training.processes.gradient_averaging import GradientSums, sum_together
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
    """Weights in the order of their use, of which each process uses others."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.both, self.neither, self.last = (
            nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(5)
        )
        enable_float32_accumulation(torch.optim.SGD(self.parameters()), takes_float32=True)

    def forward(self, rank, *, uses_all=False):
        hidden = self.first * (rank + 1)
        if rank == 1 or uses_all:
            hidden = hidden + self.second * 256
        hidden = hidden * self.both
        if uses_all:
            hidden = hidden * self.neither
        return (hidden * self.last).sum()


def summed():
    """Buckets of two gradients each, the last weights first: sent in backward, or after it where one is missing."""
    rank = PartialState(cpu=True).process_index
    gradient_averaging.BUCKET_BYTES = 2 * 3 * 4
    model, sent, is_in_backward = Branches(), [], False
    numbers = {id(weight): number for number, weight in enumerate(model.parameters())}

    def noted(tensors):
        owners = [numbers[id(w)] for t in tensors for w in model.parameters() if w.grad is t]
        sent.append((owners, is_in_backward))
        return sum_together(tensors)

    def reduced(sums, *losses):
        nonlocal is_in_backward
        model.zero_grad()
        sent.clear()
        for loss in losses:
            with sums.during_backward(model.parameters()):
                is_in_backward = True
                loss().backward()
                is_in_backward = False
        with counted_reads() as reads:
            sums.finish(model.parameters())
        return [None if w.grad is None else w.grad.tolist()[0] for w in model.parameters()], reads

    def each(reduce=dist.all_reduce):
        """The same sums, one after the other."""
        model.zero_grad()
        model(rank, uses_all=True).backward()
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        for gradient in gradients:
            reduce(gradient)
        return [gradient.tolist()[0] for gradient in gradients]

    expected = each()
    sums = GradientSums(sum_together=noted)
    assert reduced(sums, lambda: model(rank, uses_all=True)) == (expected, [])  # the host has not waited
    assert [in_backward for _, in_backward in sent] == [True, True, True]
    assert [owners for owners, _ in sent] == [[4, 3], [2, 1], [0]]

    values, reads = reduced(sums, lambda: model(rank))
    assert values == [3.0, 256.0, 259.0, None, 259.0]  # bfloat16 has 258 and 260
    assert len(reads) == 1
    assert [owners for owners, _ in sent] == [[4, 3], [2, 1], [0]]
    assert [in_backward for _, in_backward in sent] == [False] * 3  # the first lacks a gradient

    mean = GradientSums(takes_mean=True)
    one_mean = [value / 2 for value in expected]
    assert reduced(mean, lambda: model(rank, uses_all=True))[0] == one_mean
    # A trainer may go through several backward passes for one step.
    assert reduced(mean, *[lambda: model(rank, uses_all=True)] * 2)[0] == [2 * value for value in one_mean]

    with pytest.raises(UserError, match="came twice in a backward pass"):
        reduced(mean, lambda: twice_backward(model))
    dist.barrier()


def twice_backward(model):
    """A loss whose weights get a second gradient from a backward pass inside of backward."""

    class Inside(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            return x.clone()

        @staticmethod
        def backward(ctx, *d_x):
            with torch.enable_grad():
                model(0, uses_all=True).backward()
            return d_x[0]

    return model(0, uses_all=True) + Inside.apply(model.first.float()).sum()


@contextlib.contextmanager
def counted_reads():
    """Shapes of the tensors that the host reads."""
    reads, tolist = [], torch.Tensor.tolist

    def counted(tensor):
        reads.append(tensor.shape)
        return tolist(tensor)

    with mock.patch.object(torch.Tensor, "tolist", counted):
        yield reads


def test_gradients_are_summed_in_buckets_while_backward_goes_on(forks):
    for process in forks.run_two(f"import runpy; runpy.run_path({__file__!r})['summed']()"):
        assert process.returncode == 0, process.stderr


def test_buckets_hold_one_type_and_end_with_the_gradient_that_fills_them(monkeypatch):
    monkeypatch.setattr(gradient_averaging, "BUCKET_BYTES", 16)
    sizes = (4, 2, 1, 8, 1)
    weights = [nn.Parameter(torch.zeros(size)) for size in sizes]
    weights[1] = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    sent = []

    def note(gradients):
        sent.append([gradient.numel() for gradient in gradients])
        return lambda: None

    with GradientSums(sum_together=note).during_backward(iter(weights)):
        pass
    assert sent == [[1, 8], [1, 4], [2]]
