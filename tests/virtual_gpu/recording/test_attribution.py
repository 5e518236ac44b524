"""Phases, modules and categories are found without the program's help."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.recording.attribution import Attribution


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 128), nn.ReLU())
        self.head = nn.Linear(128, 256)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(hidden_BD))


@pytest.fixture
def gpu():
    with VirtualGPU("t4") as gpu:
        yield gpu


def allocations(gpu, **wanted):
    return [
        item
        for item in gpu.recorder.timeline.allocations
        if item.place == "device" and all(getattr(item, name) == value for name, value in wanted.items())
    ]


def step(model, optimizer) -> None:
    model(torch.randn(32, 64).cuda()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_phases_follow_each_other(gpu):
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    step(model, optimizer)
    model.eval()
    with torch.no_grad():
        model(torch.randn(32, 64).cuda())
    phases = [item.phase for item in allocations(gpu)]
    order = [phase for phase, before in zip(phases, [None, *phases], strict=False) if phase != before]
    once = ["forward", "backward", "optimizer_step"]
    # The first batch comes before any forward: to the trace it belongs to loading.
    assert order == ["load", *once, *once, "evaluation"] or order == [
        "load",
        *once,
        *once,
        "forward",
        "evaluation",
    ]


def test_what_the_backward_pass_needs_is_activation_and_the_rest_temporary(gpu):
    model = Net().cuda()
    hidden_BD = torch.randn(32, 64, device="cuda")
    loss = model(hidden_BD).square().mean()
    loss.backward()
    del loss
    kept = {item.size_bytes for item in allocations(gpu, category="activation")}
    assert 32 * 128 * 4 in kept
    with torch.no_grad():
        before = len(gpu.recorder.timeline.allocations)
        model(hidden_BD)
    made = gpu.recorder.timeline.allocations[before:]
    assert {item.category for item in made if item.module.startswith("body")} == {"temporary"}


def test_the_heads_outputs_are_logits(gpu):
    model = Net().cuda()
    model(torch.randn(32, 64, device="cuda")).square().mean().backward()
    sizes = [item.size_bytes for item in allocations(gpu, category="logits_and_loss", module="head")]
    assert 32 * 256 * 4 in sizes


def test_an_operator_of_the_backward_pass_belongs_to_the_module_of_its_forward(gpu):
    model = Net().cuda()
    model(torch.randn(32, 64, device="cuda", requires_grad=True)).square().mean().backward()
    by_module = {item.module for item in allocations(gpu, phase="backward")}
    assert {"body.0", "body.1", "head"} <= by_module


def test_recomputation_belongs_to_its_module_and_is_kept_for_the_backward_pass(gpu):
    model = Net().cuda()
    hidden_BD = torch.randn(32, 64, device="cuda", requires_grad=True)
    checkpoint(model.body, hidden_BD, use_reentrant=False).square().sum().backward()
    again = [
        item for item in allocations(gpu, phase="backward") if item.module == "1"
    ]  # body was called by itself
    assert [(item.size_bytes, item.category) for item in again][:1] == [(32 * 128 * 4, "activation")]


def test_a_batch_from_the_host_is_input(gpu):
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    step(model, optimizer)
    assert [item.size_bytes for item in allocations(gpu, category="input")] == [32 * 64 * 4]


def test_a_block_may_be_named(gpu):
    with gpu.during("evaluation"):
        torch.empty(1, device="cuda")
    torch.empty(1, device="cuda")
    assert [item.phase for item in allocations(gpu)] == ["evaluation", "load"]


def test_an_error_in_a_forward_leaves_no_module_behind(gpu):
    class Fails(nn.Module):
        def forward(self, hidden_BD):
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        Fails()(torch.randn(1, device="cuda"))
    assert gpu.attribution.moment[1] is False


def test_what_is_put_into_a_model_later_is_named_before_it_runs(gpu):
    model = gpu.place(Net())
    adapter = nn.Sequential(nn.Linear(8, 4))
    model.body.adapter = adapter
    assert gpu.recorder.module_of(adapter[0].weight) == "body.adapter.0"


def test_a_parameter_that_is_gone_is_forgotten():
    """Loading replaces parameters, and Python gives the ids of those that go to those that come."""
    attribution = Attribution("cuda", lambda model: None, lambda part, name: None, lambda optimizer: None)
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("body", "head")})
    attribution.name_modules(model)
    model["body"].weight = nn.Parameter(torch.zeros(2, 2))
    assert list(attribution._owners.values()) == ["head"]
    assert attribution.owner_of(model["body"].weight) == "body"


def test_a_model_that_a_program_drops_is_freed():
    with VirtualGPU("t4") as gpu:
        for _ in range(2):
            model = torch.nn.Linear(64, 64, device="cuda")
            model(torch.randn(2, 64, device="cuda"))
            del model
        timeline = gpu.recorder.timeline
        alive = timeline.alive_at(len(timeline.events) - 1)
        assert "parameter" not in {timeline.allocations[index].category for index in alive}
