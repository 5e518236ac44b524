"""The bytes that each module keeps, counted by hand, and all of them, counted by what is alive."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_models import tiny_llama
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowmem_ft import VirtualGPU
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker
from lowmem_ft.monitoring import activation_report

X = torch.randn(8, 16)


class Stack(nn.Module):
    """Four layers alike, and one that is not."""

    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)
        )
        self.norm = nn.LayerNorm(16)
        self.how = how

    def forward(self, hidden_BD):
        for layer in self.layers:
            if self.how == "plain":
                hidden_BD = layer(hidden_BD)
            else:
                hidden_BD = checkpoint(layer, hidden_BD, use_reentrant=self.how == "reentrant")
        return self.norm(hidden_BD)


def kept(report):
    return {row.name: (row.count, row.kept_bytes) for row in report.modules}


def test_each_module_keeps_what_its_backward_needs():
    report = activation_report(Stack(), X)
    assert kept(report) == {
        # Each Linear keeps its input, but for the first, whose input is the batch; GELU keeps its own.
        "layers.*.1": (4, 4 * 8 * 64 * 4),
        "layers.*.2": (4, 4 * 8 * 64 * 4),
        "layers.*.0": (3, 3 * 8 * 16 * 4),
        "norm": (1, 8 * 16 * 4 + 2 * 8 * 4),  # its input, means and deviations
    }
    assert "layers.*.1 GELU " in report.table()
    assert report.modules[-1].tensors == {"[8, 16] float32": 1, "[8, 1] float32": 2}
    assert report.elsewhere_bytes == 8 * 16 * 4  # the output
    assert report.kept_bytes == sum(row.kept_bytes for row in report.modules)


@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
def test_of_checkpointed_layers_the_inputs_are_kept(how):
    report = activation_report(Stack(how), X.clone().requires_grad_())
    rows = kept(report)
    assert rows.pop("norm")[1] == 8 * 16 * 4 + 2 * 8 * 4
    assert sum(num_bytes for _, num_bytes in rows.values()) == 3 * 8 * 16 * 4  # the first's is the batch


def test_the_layer_around_a_checkpoint_is_named():
    model = tiny_llama(num_hidden_layers=3)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    tokens = torch.randint(64, (2, 8))
    rows = kept(activation_report(model, {"input_ids": tokens, "labels": tokens}))
    assert rows["model.layers.*"] == (3, 3 * 2 * 8 * 32 * 4)


@pytest.mark.parametrize("how", ["plain", "reentrant", "not reentrant"])
def test_a_virtual_gpu_keeps_what_the_cpu_keeps(how):
    real = activation_report(Stack(how), X.clone().requires_grad_())
    with VirtualGPU("t4"):
        traced = activation_report(Stack(how).cuda(), torch.randn(8, 16, device="cuda").requires_grad_())
    assert traced == real


def test_nothing_that_lives_is_left_out():
    model, tokens = tiny_llama(), torch.randint(64, (2, 8))
    with StorageTracker() as tracker:
        output = model(input_ids=tokens, labels=tokens)
        alive_bytes = tracker.live_bytes
    report = activation_report(model, {"input_ids": tokens, "labels": tokens})
    assert report.kept_bytes + report.elsewhere_bytes == alive_bytes
    assert report.elsewhere_bytes < 0.1 * alive_bytes
    assert output.loss.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())


class Stashes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mine = x * 2
        ctx.save_for_backward(x * 3)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_what_is_kept_in_other_ways_is_counted_apart():
    model = nn.Linear(16, 16)
    report = activation_report(model, (X,), lambda out: Stashes.apply(out).sum())
    assert kept(report) == {"(outside the model)": (1, 512)}
    assert report.elsewhere_bytes == 512 + 512 + 4  # the model's output, the stash and the loss
    assert "outside the model" in report.table()


def test_a_branch_that_is_thrown_away_keeps_nothing():
    class Forgets(nn.Module):
        def forward(self, x):
            x.exp()
            return x * 2

    report = activation_report(Forgets(), X.clone().requires_grad_())
    assert (report.modules, report.kept_bytes, report.elsewhere_bytes) == ((), 0, 512)


def test_a_storage_counts_once_and_random_numbers_stay():
    class Shares(nn.Module):
        def forward(self, x):
            y = torch.dropout(x, 0.5, True)
            return (y[:4] * y[4:]).sum() + (y * y).sum()

    x = X.clone().requires_grad_()
    state = torch.get_rng_state()
    report = activation_report(Shares(), {"x": x})
    assert torch.equal(torch.get_rng_state(), state)
    assert report.modules[0].kept_bytes == report.kept_bytes == 512 + 512  # y, and the mask


def test_the_table_is_80_columns_wide_and_the_json_has_its_bytes():
    report = activation_report(Stack(), X)
    table = report.table(max_rows=2)
    assert max(map(len, table.splitlines())) <= 80
    assert "(2 more)" in table
    assert json.loads(report.to_json())["modules"][0]["count"] == 4


def test_a_forward_without_gradients_is_told():
    with torch.no_grad(), pytest.raises(UserError, match="requires no gradient"):
        activation_report(nn.Linear(16, 16).requires_grad_(False), X)
