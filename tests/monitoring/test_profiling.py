"""Each operator's time belongs to its module and its part of the step, and no hook stays."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.monitoring import StepProfiler
from lowmem_ft.monitoring.profiling.event_rows import EventRows, busy_seconds
from lowmem_ft.monitoring.profiling.module_ranges import MODULE, PART, STEP
from lowmem_ft.monitoring.profiling.modules_alike import ModulesAlike
from lowmem_ft.monitoring.profiling.step_profile import OUTSIDE, PYTHON, ProfileRow, StepProfile


class Useless(nn.Module):
    """Does much that changes nothing."""

    def forward(self, hidden_BD):
        wasted = torch.ones(512, 512)
        for _ in range(40):
            wasted = wasted @ wasted * 1e-3
        return hidden_BD


class SlowBackward(torch.autograd.Function):
    """Does the same in backward alone."""

    @staticmethod
    def forward(ctx, hidden_BD):
        return hidden_BD.clone()

    @staticmethod
    def backward(ctx, *gradients):
        return Useless()(*gradients)


class UselessInBackward(nn.Module):
    def forward(self, hidden_BD):
        return SlowBackward.apply(hidden_BD)


class Stack(nn.Module):
    """Three layers alike."""

    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3)
        )
        self.how = how

    def forward(self, hidden_BD):
        for layer in self.layers:
            if self.how == "plain":
                hidden_BD = layer(hidden_BD)
            else:
                hidden_BD = checkpoint(layer, hidden_BD, use_reentrant=self.how == "reentrant")
        return hidden_BD


def profiled(model, num_steps: int = 2) -> tuple[StepProfile, torch.Tensor]:
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(8, 16).requires_grad_()
    with StepProfiler(model, first_step=5) as profiler:
        loss = torch.zeros(())
        for _ in range(num_steps):
            with profiler.step():
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
    return profiler.result(), loss.detach()


def hooks_of(model):
    return [
        (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._forward_hooks_always_called))
        for m in model.modules()
    ]


def calls(profile: StepProfile, *operators: str) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    for row in profile.rows:
        if row.operator in operators:
            # One that others disturbed in every step has a row of its own.
            module = re.sub(r"layers\.\d", "layers.*", row.module)
            found[row.part, module] = found.get((row.part, module), 0) + row.calls
    return found


@pytest.mark.parametrize("how", ["plain", "reentrant", "not reentrant"])
def test_products_belong_to_the_layer_that_they_are_of(how):
    """Forward, forward again, and the two products of backward: one for the input, one for the weight."""
    profile, _ = profiled(Stack(how))
    expected = {("forward", "layers.*.0"): 3, ("forward", "layers.*.2"): 3}
    expected |= {("backward", "layers.*.0"): 6, ("backward", "layers.*.2"): 6}
    if how != "plain":
        expected["recomputation", "layers.*.0"] = 3
        # Without reentrance the last operator is not repeated: nothing that is saved comes after its input.
        expected["recomputation", "layers.*.2"] = 3
    assert calls(profile, "addmm", "mm") == expected
    assert calls(profile, "gelu_backward") == {("backward", "layers.*.1"): 3}
    assert calls(profile, "add_")["update", OUTSIDE] == 12
    assert profile.steps == (5, 6)


def test_the_times_are_all_of_the_step():
    profile, _ = profiled(Stack("not reentrant"))
    assert sum(row.host_seconds for row in profile.rows) == pytest.approx(profile.step_seconds, rel=1e-6)
    assert all(row.device_seconds == 0 for row in profile.rows)


@pytest.mark.parametrize("kind,part", [(Useless, "forward"), (UselessInBackward, "backward")])
def test_a_slow_module_comes_first(kind, part):
    model = Stack()
    model.get_submodule("layers.1").add_module("1", kind())
    profile, _ = profiled(model)
    _, by_operator, by_module = profile.sections()
    assert by_operator.rows[0][0] == f"mm  {part} of layers.1.1"
    assert by_module.rows[0][0] == f"layers.1.1 {kind.__name__}"
    assert f"layers.1.1 {kind.__name__}" in profile.table()


def test_a_module_with_a_slow_hook_is_told_apart_from_those_like_it():
    model, useless = Stack(), Useless()
    model.get_submodule("layers.2.0").register_forward_hook(lambda module, args, output: useless(output))
    profile, _ = profiled(model)
    assert [one.module for one in profile.slow] == ["layers.2.0"]
    assert profile.slow[0].seconds > 2 * profile.slow[0].others_seconds
    assert next(row for row in profile.sections()).title == "By part of the step, in ms a step"
    assert list(profile.sections())[2].rows[0][0] == "layers.2.0 Linear"


@pytest.mark.parametrize(
    "seconds, slow",
    [
        ([(1.0, 1.0, 1.0), (1.0, 9.0, 1.0)], []),
        ([(9.0, 1.0, 1.0), (1.0, 1.0, 9.0)], []),
        ([(1.0, 1.0, 3.0), (1.0, 9.0, 4.0)], ["layers.2.0"]),
        ([(1.0, 1.0, 3.0)], ["layers.2.0"]),
    ],
    ids=["one step interrupted", "each step interrupted elsewhere", "slow in both", "one step alone"],
)
def test_a_module_that_was_interrupted_in_one_of_several_steps_is_not_slow(seconds, slow):
    """Seconds of three layers alike, by step."""
    steps = [
        [
            ProfileRow(part="forward", module=f"layers.{index}.0", operator="mm", calls=1.0, host_seconds=one)
            for index, one in enumerate(of_step)
        ]
        for of_step in seconds
    ]
    alike = ModulesAlike(Stack(), steps, of_device=False, step_seconds=max(map(sum, seconds)))
    assert [one.module for one in alike.slow] == slow
    assert sum(row.host_seconds for row in alike.rows()) == pytest.approx(sum(map(sum, seconds)) / len(steps))
    assert {row.module for row in alike.rows()} == {"layers.*.0", *slow}


def test_a_profile_changes_no_number_and_leaves_no_hook():
    torch.manual_seed(0)
    model = Stack("not reentrant")
    before, weights = hooks_of(model), {name: value.clone() for name, value in model.state_dict().items()}
    _, loss = profiled(model)
    assert hooks_of(model) == before
    model.load_state_dict(weights)
    model.zero_grad()
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(8, 16).requires_grad_()
    plain = torch.zeros(())
    for _ in range(2):
        plain = model(batch).square().mean()
        plain.backward()
        optimizer.step()
    assert torch.equal(plain, loss)


def test_an_error_in_a_module_leaves_no_hook_and_no_range_open():
    model = Stack()
    before = hooks_of(model)
    with StepProfiler(model) as profiler:
        with pytest.raises(RuntimeError), profiler.step():
            model(torch.ones(8, 3))
        with profiler.step():
            model(torch.ones(8, 16))
    assert hooks_of(model) == before
    # The product that failed was called, too: one and three of them in two steps.
    assert calls(profiler.result(), "addmm") == {("forward", "layers.*.0"): 2, ("forward", "layers.*.2"): 1.5}


def test_a_profile_without_a_step_is_refused():
    with StepProfiler(Stack()) as profiler:
        pass
    with pytest.raises(UserError, match=r"with profiler\.step"):
        profiler.result()


def test_a_profile_is_kept_as_json():
    profile, _ = profiled(Stack())
    assert StepProfile.from_json(profile.to_json()) == profile


# --- events of a GPU, which made here ---------------------------------------------------------------------


@dataclass
class MadeEvent:
    """An event from one microsecond to another."""

    name: str
    start: float
    end: float
    cpu_children: list[MadeEvent] = field(default_factory=list)
    kernels: list = field(default_factory=list)
    thread: int = 1
    fwd_thread: int = 0
    sequence_nr: int = -1
    is_user_annotation: bool = False
    device_type: object = field(default_factory=lambda: SimpleNamespace(name="CPU"))
    cpu_parent: MadeEvent | None = None

    def __post_init__(self):
        self.time_range = SimpleNamespace(
            start=self.start, end=self.end, elapsed_us=lambda: self.end - self.start
        )
        for child in self.cpu_children:
            child.cpu_parent = self


def kernel(name, duration):
    return SimpleNamespace(name=name, duration=duration)


def events_of_a_gpu():
    """A step: a forward with one product, its backward in another thread, and a number that is read."""
    product = MadeEvent(
        "aten::mm",
        10,
        20,
        [MadeEvent("cudaLaunchKernel", 12, 18)],
        [kernel("gemm", 40)],
        sequence_nr=7,
    )
    read = MadeEvent("aten::item", 70, 95, [MadeEvent("cudaStreamSynchronize", 72, 92)])
    # A range has a kernel of its own name, and the launch of a Triton kernel.
    module = MadeEvent(MODULE + "head", 5, 30, [product], [kernel(MODULE + "head", 45), kernel("fused", 3)])
    step = MadeEvent(STEP, 0, 100, [module, MadeEvent(PART + "backward", 30, 70), read])
    gradient = MadeEvent("aten::mm", 42, 50, [], [kernel("gemm", 80)], thread=2)
    node = MadeEvent(
        "autograd::engine::evaluate_function: MmBackward0", 40, 60, [gradient], [], 2, 1, sequence_nr=7
    )
    elsewhere = MadeEvent("autograd::engine::evaluate_function: Other", 140, 160, thread=2)
    gpu = SimpleNamespace(name="CUDA")
    on_device = [MadeEvent("gemm", 15, 55, device_type=gpu), MadeEvent("gemm", 45, 60, device_type=gpu)]
    return [step, node, elsewhere, *on_device]


def test_kernels_count_where_they_were_launched_and_waits_where_the_host_waits():
    (rows,) = EventRows(events_of_a_gpu()).by_step()
    found = {(row.part, row.module, row.operator): row for row in rows}
    product = found["forward", "head", "mm"]
    assert (product.calls, product.host_seconds, product.device_seconds) == pytest.approx((1, 10e-6, 40e-6))
    assert found["forward", "head", "fused"].device_seconds == pytest.approx(3e-6)
    assert found["forward", "head", PYTHON].device_seconds == 0
    assert found["backward", "head", "mm"].device_seconds == pytest.approx(80e-6)
    # The thread that called backward waits for the other one, which works for half of the time.
    assert found["backward", OUTSIDE, PYTHON].host_seconds == pytest.approx(20e-6)
    assert found["rest", OUTSIDE, "item"].wait_seconds == pytest.approx(20e-6)
    assert sum(row.wait_seconds for row in rows) == pytest.approx(20e-6)
    assert busy_seconds(events_of_a_gpu()) == pytest.approx(45e-6)


def test_an_operator_that_an_estimate_knows_counts_with_what_it_calls():
    inner = MadeEvent("aten::copy_", 2, 4, [], [kernel("copy", 6)])
    step = MadeEvent(STEP, 0, 10, [MadeEvent("aten::_to_copy", 1, 5, [inner])])
    (rows,) = EventRows([step], as_one={"_to_copy", "copy_"}).by_step()
    assert {row.operator: row.device_seconds for row in rows} == pytest.approx({PYTHON: 0, "_to_copy": 6e-6})
