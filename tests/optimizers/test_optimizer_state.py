"""State exported, written as safetensors and JSON, and imported continues bit for bit, whatever the optimizer."""

import itertools
import json

import pytest
import torch
from devices_to_test_on import on_cuda, on_virtual_gpu, running_on
from safetensors.torch import load_file, save_file
from torch import nn

from lowmem_ft.foundation.errors import CheckpointError
from lowmem_ft.optimizers import (
    OPTIMIZERS,
    OptimizerConfig,
    OptimizerState,
    create_optimizer,
    export_optimizer_state,
    import_optimizer_state,
)

ON_CPU = [name for name, row in OPTIMIZERS.items() if row.devices is None or "cpu" in row.devices]
EVERY_ROW = [pytest.param(name, "cpu", id=name) for name in ON_CPU] + on_cuda(OPTIMIZERS)
UNPAGED_TWIN = {
    "paged_adamw_8bit": "adamw_bnb_8bit",
    "paged_lion_8bit": "lion_8bit",
    "paged_lion_32bit": "lion_32bit",
}


class Model(nn.Module):
    """An embedding, two matrices large enough for 8-bit state, and a parameter that never gets a gradient."""

    def __init__(self, dtype=torch.float32, width=64):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(70, width)
        self.hidden = nn.Linear(width, width)
        self.linear = nn.Linear(width, 70)
        self.unused = nn.Parameter(torch.zeros(3))
        self.to(dtype)


def build(name, device="cpu", dtype=torch.float32, width=64, **fields):
    model = Model(dtype, width).to(device)
    config = OptimizerConfig(name=name, weight_decay=0.01, **fields)
    return model, create_optimizer(model, config, learning_rate=1e-2)


def train(model, optimizer, steps):
    """Steps with gradients that depend on the step and the weights, and a schedule that changes the rate."""
    device = model.linear.weight.device
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 70, (32,), generator=generator).to(device)
        optimizer.zero_grad()
        model.linear(model.hidden(model.embedding(tokens))).float().square().mean().backward()
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
            group["lr"] = group["initial_lr"] * 0.97**step
        optimizer.step()


def through_files(state, folder, has_values):
    """What a checkpoint does to it: it comes back on the host."""
    if not has_values:
        return OptimizerState(
            tensors={key: tensor.cpu() for key, tensor in state.tensors.items()},
            scalars=json.loads(json.dumps(state.scalars)),
        )
    save_file(
        {key: tensor.contiguous() for key, tensor in state.tensors.items()}, folder / "state.safetensors"
    )
    (folder / "state.json").write_text(json.dumps(state.scalars))
    return OptimizerState(
        tensors=load_file(folder / "state.safetensors"),
        scalars=json.loads((folder / "state.json").read_text()),
    )


def same_bits(first, second):
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def assert_same_state(first, second, *, has_values=True):
    """Every entry of the state equal in value, type and device; and the same hyperparameters."""
    for group, other in zip(first.param_groups, second.param_groups, strict=True):
        assert {k: v for k, v in group.items() if k != "params"} == {
            k: v for k, v in other.items() if k != "params"
        }
        for parameter, twin in zip(group["params"], other["params"], strict=True):
            state, twin_state = first.state.get(parameter, {}), second.state.get(twin, {})
            assert state.keys() == twin_state.keys()
            for key, value in state.items():
                assert type(value) is type(twin_state[key])
                if isinstance(value, torch.Tensor):
                    assert (value.dtype, value.device) == (twin_state[key].dtype, twin_state[key].device)
                    assert value.shape == twin_state[key].shape
                    assert not has_values or torch.equal(value, twin_state[key])
                else:
                    assert value == twin_state[key]


FORMATS = [
    pytest.param(torch.float32, {}, id="float32"),
    pytest.param(torch.bfloat16, {}, id="bfloat16"),
    pytest.param(torch.bfloat16, {"master": "split16"}, id="split16"),
    pytest.param(torch.bfloat16, {"master": "split24", "state": "8bit"}, id="split24-8bit"),
    pytest.param(torch.bfloat16, {"master": "stochastic_rounding", "state": "bf16"}, id="sr-bf16"),
    pytest.param(torch.bfloat16, {"master": "none"}, id="none"),
    pytest.param(
        torch.bfloat16, {"master": "split24", "state": {"exp_avg": "8bit", "exp_avg_sq": "bf16"}}, id="mixed"
    ),
]


def in_formats():
    """AdamW in each format, and each optimizer on each device with the next format that it takes, in turn."""
    yield from (pytest.param("adamw", "cpu", *of.values, id=f"adamw-{of.id}") for of in FORMATS)
    turn = itertools.cycle(FORMATS)
    for case in EVERY_ROW[1:] + on_virtual_gpu(OPTIMIZERS):
        row = OPTIMIZERS[case.values[0]]
        form = next(of for of in turn if takes(row, of.values[1]))
        yield pytest.param(*case.values, *form.values, marks=case.marks, id=f"{case.id}-{form.id}")


def takes(row, formats):
    state = formats.get("state")
    averages = {*state} if isinstance(state, dict) else set()
    can_state = row.takes_state_formats and averages <= {*row.averages}
    return ("master" not in formats or row.takes_formats) and (state is None or can_state)


@pytest.mark.parametrize("name,device,dtype,formats", in_formats())
def test_three_steps_saved_and_three_more_equal_six(name, device, dtype, formats, tmp_path):
    with running_on(device) as (device, has_values):
        steps = 3 if has_values else 1
        straight, optimizer = build(name, device, dtype, **formats)
        train(straight, optimizer, range(2 * steps))

        model, first = build(name, device, dtype, **formats)
        train(model, first, range(steps))
        exported = export_optimizer_state(first, model.named_parameters())
        state = through_files(exported, tmp_path, has_values)
        resumed, second = build(name, device, dtype, **formats)
        resumed.load_state_dict(model.state_dict())
        import_optimizer_state(second, resumed.named_parameters(), state)
        assert_same_state(first, second, has_values=has_values)
        train(resumed, second, range(steps, 2 * steps))
        assert not has_values or same_bits(resumed, straight)
        assert_same_state(second, optimizer, has_values=has_values)


def test_momentum_zero_keeps_no_state_and_resumes():
    straight, optimizer = build("sgd", momentum=0.0)
    train(straight, optimizer, range(4))
    model, first = build("sgd", momentum=0.0)
    train(model, first, range(2))
    state = export_optimizer_state(first, model.named_parameters())
    assert not state.tensors
    resumed, second = build("sgd", momentum=0.0)
    resumed.load_state_dict(model.state_dict())
    import_optimizer_state(second, resumed.named_parameters(), state)
    train(resumed, second, range(2, 4))
    assert same_bits(resumed, straight)


@pytest.mark.parametrize("name,device", on_cuda(UNPAGED_TWIN) + on_virtual_gpu(UNPAGED_TWIN))
@pytest.mark.parametrize("into_paged", [True, False])
def test_paged_and_unpaged_load_each_other(name, device, into_paged):
    names = (UNPAGED_TWIN[name], name) if into_paged else (name, UNPAGED_TWIN[name])
    with running_on(device) as (device, has_values):
        model, first = build(
            names[0], device, width=2048
        )  # bitsandbytes pages tensors from 100,000 elements on
        train(model, first, range(3))
        resumed, second = build(names[1], device, width=2048)
        resumed.load_state_dict(model.state_dict())
        import_optimizer_state(
            second, resumed.named_parameters(), export_optimizer_state(first, model.named_parameters())
        )
        train(model, first, range(3, 6))
        train(resumed, second, range(3, 6))
        assert not has_values or same_bits(model, resumed)
        assert (is_paged(first), is_paged(second)) == (not into_paged, into_paged)


def is_paged(optimizer):
    return any(getattr(state.get("state1"), "is_paged", False) for state in optimizer.state.values())


def test_export_shares_tensors_and_import_copies_them():
    model, first = build("adamw")
    train(model, first, range(2))
    state = export_optimizer_state(first, model.named_parameters())
    moment = first.state[model.linear.weight]["exp_avg"]
    assert state.tensors["linear.weight.exp_avg"].data_ptr() == moment.data_ptr()
    resumed, second = build("adamw")
    import_optimizer_state(second, resumed.named_parameters(), state)
    assert second.state[resumed.linear.weight]["exp_avg"].data_ptr() != moment.data_ptr()


def test_an_unfused_optimizer_takes_fused_state_and_keeps_its_own_kernel():
    """Of torch's own optimizers, which somebody else's script may bring."""
    model, other = Model(), Model()
    fused = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    train(model, fused, range(2))
    state = export_optimizer_state(fused, model.named_parameters())
    unfused = torch.optim.AdamW(other.parameters(), lr=1.0, fused=False)
    import_optimizer_state(unfused, other.named_parameters(), state)
    assert all(group["fused"] is False for group in unfused.param_groups)
    assert unfused.param_groups[0]["lr"] == fused.param_groups[0]["lr"]
    train(other, unfused, range(2, 3))


def test_differences_are_all_named():
    model, first = build("adamw")
    train(model, first, range(1))
    state = export_optimizer_state(first, model.named_parameters())
    other = Model()
    other.unused = None
    other.extra = nn.Parameter(torch.zeros(2))
    other.linear = nn.Linear(64, 9)
    second = create_optimizer(other, OptimizerConfig(), learning_rate=1e-2)
    with pytest.raises(CheckpointError) as caught:
        import_optimizer_state(second, other.named_parameters(), state)
    text = str(caught.value)
    assert "holds unused, which this run does not train" in text
    assert "nothing for extra, which this run trains" in text
    assert "linear.weight of shape [70, 64], but in this run its shape is [9, 64]" in text
    assert len(caught.value.problems) == 4
    assert not second.state  # nothing was changed


@pytest.mark.parametrize(
    "names", [("adamw", "lion"), ("lion_8bit", "lion_32bit"), ("adamw", "adamw_bnb_8bit")]
)
def test_state_of_another_optimizer_is_refused(names):
    model, first = build(names[0])
    train(model, first, range(1))
    other, second = build(names[1])
    with pytest.raises(
        CheckpointError, match=r"optimizer state .*Set optimizer\.name to (that one|the one that wrote it)"
    ):
        import_optimizer_state(
            second, other.named_parameters(), export_optimizer_state(first, model.named_parameters())
        )
