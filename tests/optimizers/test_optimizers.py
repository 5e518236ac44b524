"""Every row of the table trains; groups are the Trainer's; what cannot run says why."""

import itertools
import sys
from typing import get_args, get_type_hints

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from devices_to_test_on import on_cuda, on_virtual_gpu, running_on
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

from lowmem_ft import load_recipe
from lowmem_ft.foundation import wsl
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.optimizers import (
    OPTIMIZERS,
    OptimizerConfig,
    check_optimizer,
    create_optimizer,
    may_lose_updates,
    parameter_groups,
)
from lowmem_ft.optimizers.table import AVERAGE_BYTES, OptimizerName, StateName, optimizers_that
from lowmem_ft.optimizers.updates.update_rule import WholeParameterRule
from lowmem_ft.recipe.checks.device_checks import check_device_of_run
from lowmem_ft.virtual_gpu import VirtualGPU

OWN_OPTIMIZERS, WITH_FORMATS = optimizers_that("takes_formats"), optimizers_that("takes_state_formats")
CPU = torch.device("cpu")
CPU_NAMES = [name for name, row in OPTIMIZERS.items() if row.devices is None or "cpu" in row.devices]
EVERY_ROW = [pytest.param(name, "cpu", id=name) for name in CPU_NAMES] + on_cuda(OPTIMIZERS)
BITSANDBYTES_8BIT = [name for name in CPU_NAMES if name.endswith("8bit")]

# Learning rates of those that do not descend on the regression below with 0.02; bitsandbytes' have those of ours.
_OTHER_RATES = {"sgd": 5.0, "lion": 0.003}
LEARNING_RATE = {name: _OTHER_RATES.get(row.stand_in or name, 0.02) for name, row in OPTIMIZERS.items()}


class Regression(nn.Module):
    """Embedding, norm and a matrix of more than 4096 elements, so that 8-bit optimizers do use 8 bits."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(80, 64)
        self.norm = nn.LayerNorm(64)
        self.linear = nn.Linear(64, 80)
        self.to(dtype)
        self.tokens = torch.randint(0, 80, (256,))
        self.targets = (torch.randn(80, 80) / 8)[self.tokens]

    def loss(self):
        prediction = self.linear(self.norm(self.embedding(self.tokens)))
        return (prediction.float() - self.targets).square().mean()


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model.loss().backward()
        optimizer.step()


def build(name, device="cpu", dtype=torch.float32, **fields):
    model = Regression(dtype).to(device)
    model.tokens, model.targets = model.tokens.to(device), model.targets.to(device)
    config = OptimizerConfig(name=name, **fields)
    return model, create_optimizer(model, config, learning_rate=LEARNING_RATE[name])


def test_every_name_has_a_row_and_every_row_a_name():
    assert sorted(OPTIMIZERS) == sorted(get_args(OptimizerName))


def test_every_row_is_an_update_of_ours_or_an_optimizer_of_bitsandbytes():
    for row in OPTIMIZERS.values():
        assert (row.rule is None) == (row.bitsandbytes is not None) == (row.stand_in is not None)


@pytest.mark.parametrize("name", OWN_OPTIMIZERS)
def test_streamed_weights_are_trained_by_updates_that_need_no_whole_gradient(name):
    row = OPTIMIZERS[name]
    assert row.updates_by_slices != isinstance(row.update_rule(), WholeParameterRule)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name,device", EVERY_ROW + on_virtual_gpu(OPTIMIZERS))
def test_it_learns(name, device, dtype):
    with running_on(device) as (device, has_values):
        model, optimizer = build(name, device, dtype)
        before = model.loss().item()
        train(model, optimizer, 60 if has_values else 2)
        assert not has_values or model.loss().item() < 0.3 * before
        assert all(parameter.dtype == dtype for parameter in model.parameters())
        assert optimizer.state


@pytest.mark.parametrize("name,device", EVERY_ROW)
def test_weight_decay_shrinks_weights_and_spares_biases_and_norms(name, device):
    with running_on(device):
        model, optimizer = build(name, device, weight_decay=0.5)
        before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        kept = 1 - 0.5 * LEARNING_RATE[name]
        after = dict(model.named_parameters())
        for key in ("embedding.weight", "linear.weight"):
            torch.testing.assert_close(after[key].detach(), before[key] * kept)
        for key in ("norm.weight", "norm.bias", "linear.bias"):
            assert torch.equal(after[key], before[key])


@pytest.mark.parametrize("name", OWN_OPTIMIZERS)
def test_what_is_counted_is_what_the_update_keeps_also_where_a_hyperparameter_is_0(name):
    row, shape = OPTIMIZERS[name], torch.Size([4, 4])
    numbers = [key for key, default in row.hyperparameters.items() if isinstance(default, float)]
    for changed in ({}, *({key: 0.0} for key in numbers)):
        config = OptimizerConfig(name=name, **changed)
        kept = row.update_rule().averages(shape, config.hyperparameters())
        assert config.state_bytes == len(kept) * AVERAGE_BYTES["fp32"], changed


@pytest.mark.parametrize("state", get_args(StateName))
@pytest.mark.parametrize("name,device", EVERY_ROW + on_virtual_gpu(OPTIMIZERS))
def test_the_table_states_the_bytes_of_state(name, device, state):
    """On one matrix; what the table leaves out (step counters, Adafactor's row and column) is below 2% here."""
    with running_on(device) as (device, _):
        assert_held_is_stated(name, device, state)


def assert_held_is_stated(name, device, state):
    if name not in WITH_FORMATS and state != "fp32":
        with pytest.raises(UserError, match=rf"optimizer.state={state} needs optimizer.name=adamw\|"):
            build(name, device, state=state)
        return
    model = nn.Linear(512, 512, bias=False).to(device)
    optimizer = create_optimizer(model, OptimizerConfig(name=name, state=state), learning_rate=1e-3)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    held = sum(
        value.nbytes
        for key, value in optimizer.state[model.weight].items()
        if isinstance(value, torch.Tensor) and not key.startswith("qmap")  # shared by all parameters
    )
    stated = OPTIMIZERS[name].state_bytes(state)
    assert held / model.weight.numel() == pytest.approx(stated, abs=0.02)


MASTERS, STATES = get_args(get_type_hints(OptimizerConfig)["master"]), get_args(StateName)


def in_formats():
    """Every optimizer in every format; `make test` takes those in which any two of the three meet."""
    for (row, name), (column, master) in itertools.product(enumerate(WITH_FORMATS), enumerate(MASTERS)):
        for place, state in enumerate(STATES):
            is_quick = (row + column) % len(STATES) == place
            yield pytest.param(name, state, master, marks=[] if is_quick else pytest.mark.slow)
    for name in OWN_OPTIMIZERS:
        if name not in WITH_FORMATS:
            yield from ((name, "fp32", master) for master in MASTERS)


def test_any_two_of_an_optimizer_and_its_formats_meet():
    assert len(WITH_FORMATS) >= len(STATES) <= len(MASTERS), "or the square of in_formats() has gaps"


@pytest.mark.parametrize("name,state,master", in_formats())
def test_every_optimizer_learns_in_every_format(name, state, master):
    model, optimizer = build(name, dtype=torch.bfloat16, state=state, master=master)
    before = model.loss().item()
    train(model, optimizer, 60)
    assert model.loss().item() < 0.5 * before
    kept = {"fp32": {"master"}, "split16": {"low"}, "split24": {"low"}}.get(master, set())
    assert all({"master", "low"} & state.keys() == kept for state in optimizer.state.values())


def test_float32_weights_are_their_own_master_and_refuse_another():
    model, optimizer = build("adamw")
    train(model, optimizer, 1)
    assert all("master" not in state for state in optimizer.state.values())
    with pytest.raises(UserError, match=r"optimizer.master=split16 is for bfloat16 weights, .* are float32"):
        build("adamw", master="split16")


def test_float16_weights_are_refused():
    with pytest.raises(UserError, match="float32 or bfloat16, got float16"):
        build("adamw", dtype=torch.float16)


@pytest.mark.parametrize(
    "name,fields,loses",
    [
        ("adamw", {}, False),
        ("adamw", {"master": "split24"}, False),
        ("adamw", {"master": "stochastic_rounding"}, False),
        ("adamw", {"master": "none"}, True),
        ("adamw_bnb_8bit", {}, True),
    ],
)
def test_weights_without_a_master_are_warned_of(name, fields, loses, caplog):
    _, optimizer = build(name, dtype=torch.bfloat16, **fields)
    assert may_lose_updates(optimizer) is loses
    assert ("updates smaller than their rounding are lost" in caplog.text) is loses
    _, optimizer = build(name, dtype=torch.float32)
    assert not may_lose_updates(optimizer)


def test_groups_are_those_of_the_trainer():
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        attention_bias=True, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.model.layers[0].requires_grad_(False)
    trainer_decays = set(Trainer.get_decay_parameter_names(None, model))
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decayed, not_decayed = parameter_groups(model, 0.1)
    assert list(map(id, decayed["params"])) == [id(p) for name, p in trainable if name in trainer_decays]
    assert list(map(id, not_decayed["params"])) == [
        id(p) for name, p in trainable if name not in trainer_decays
    ]
    assert (decayed["weight_decay"], not_decayed["weight_decay"]) == (0.1, 0.0)
    assert sum(parameter is model.lm_head.weight for parameter in decayed["params"]) == 1  # tied, yet once


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(UserError, match="all of them frozen"):
        create_optimizer(nn.Linear(2, 2).requires_grad_(False), OptimizerConfig(), learning_rate=1e-3)


def test_hyperparameters_reach_the_optimizer_and_null_is_its_own_default():
    _, lion = build("lion")
    assert lion.param_groups[0]["betas"] == (0.9, 0.99)
    _, adamw = build("adamw", betas=(0.8, 0.95), eps=1e-6)
    assert (adamw.param_groups[0]["betas"], adamw.param_groups[0]["eps"]) == ((0.8, 0.95), 1e-6)
    _, sgd = build("sgd", momentum=0.0)
    assert sgd.param_groups[0]["momentum"] == 0.0


def test_everything_wrong_is_named_at_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UserError) as caught:
        check_optimizer(OptimizerConfig(name="paged_lion_8bit", eps=1e-6, weight_decay=-1.0), CPU)
    assert len(caught.value.problems) == 4
    config = OptimizerConfig(name="sgd", betas=(0.9, 1.0), eps=-1.0, momentum=1.5, weight_decay=-0.1)
    with pytest.raises(UserError) as caught:
        check_optimizer(config, CPU)
    text = str(caught.value)
    assert len(caught.value.problems) == 6  # betas and eps: not taken, and out of range
    config = OptimizerConfig(name="paged_lion_8bit", state="8bit", master="split16", in_backward=True)
    assert [problem.split()[0] for problem in config.problems()] == [
        "optimizer.state=8bit",
        "optimizer.master=split16",
        "optimizer.in_backward=true",
    ]
    assert all("Set optimizer.name=lion or" in problem for problem in config.problems())
    for named in ("optimizer.betas", "optimizer.eps", "optimizer.momentum", "optimizer.weight_decay"):
        assert named in text


def test_the_rows_name_the_averages_that_their_updates_keep():
    for row in OPTIMIZERS.values():
        if row.rule is not None and row.takes_state_formats:
            assert (*row.update_rule().averages(torch.Size([2, 3]), row.hyperparameters),) == row.averages


def test_formats_by_average_are_checked_against_the_optimizers_own():
    def problems(**fields):
        return " ".join(OptimizerConfig(**fields).problems())

    mixed = {"exp_avg": "bf16", "exp_avg_sq": "fp32"}
    assert problems(state=mixed) == ""
    assert (
        OptimizerConfig(state=mixed).state_bytes
        == OptimizerConfig(state={"exp_avg": "bf16"}).state_bytes
        == 6
    )
    assert "lion, which has momentum; got exp_avg, exp_avg_sq." in problems(name="lion", state=mixed)
    assert "optimizer.state={exp_avg: bf16, exp_avg_sq: fp32} needs" in problems(
        name="lion_8bit", state=mixed
    )
    assert "needs optimizer.name=adamw|sgd|lion, got adafactor" in problems(name="adafactor", state=mixed)
    assert "optimizer.momentum=0 keeps none" in problems(
        name="sgd", momentum=0.0, state={"momentum_buffer": "bf16"}
    )


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in CPU_NAMES])
def test_paged_forms_refuse_the_cpu_and_name_one_that_runs_there(name):
    with pytest.raises(UserError, match=f"optimizer.name={name} runs on cuda, got device cpu") as caught:
        create_optimizer(nn.Linear(2, 2), OptimizerConfig(name=name), learning_rate=1e-3)
    suggested = str(caught.value).rpartition("optimizer.name=")[2].rstrip(".")
    check_optimizer(OptimizerConfig(name=suggested), CPU)
    with VirtualGPU("t4") as gpu:
        check_optimizer(OptimizerConfig(name=name), gpu.device)


@pytest.mark.parametrize("name", [name for name, row in OPTIMIZERS.items() if row.bitsandbytes is not None])
def test_paged_forms_refuse_wsl_which_cannot_spill_and_others_do_not(name, monkeypatch):
    monkeypatch.setattr(wsl.platform, "release", lambda: "5.15.167.4-microsoft-standard-WSL2")
    config, gpu = OptimizerConfig(name=name), torch.device("cuda", 0)
    if not OPTIMIZERS[name].bitsandbytes.paged:
        check_optimizer(config, gpu)
        return
    with pytest.raises(UserError) as refused:
        check_optimizer(config, gpu)
    assert f"optimizer.name={name} lets state spill" in str(refused.value)
    for way_out in (OPTIMIZERS[name].elsewhere, OPTIMIZERS[name].stand_in):
        assert f"optimizer.name={way_out}" in str(refused.value)
        check_optimizer(OptimizerConfig(name=way_out), gpu)
    with pytest.raises(UserError, match="WSL"):  # before torch is imported
        check_device_of_run(load_recipe("tiny", [f"optimizer.name={name}", "training.use_cpu=false"]))


def test_missing_bitsandbytes_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UserError, match=r"adamw_bnb_8bit.*pip install 'lowmem-ft\[bitsandbytes\]'"):
        create_optimizer(nn.Linear(2, 2), OptimizerConfig(name="adamw_bnb_8bit"), learning_rate=1e-3)
    create_optimizer(nn.Linear(2, 2), OptimizerConfig(), learning_rate=1e-3)


@pytest.mark.parametrize("name", BITSANDBYTES_8BIT)
def test_embeddings_keep_32_bit_state_also_when_the_head_is_tied(name):
    model, optimizer = build(name)
    train(model, optimizer, 1)
    assert optimizer.state[model.embedding.weight]["state1"].dtype == torch.float32
    assert optimizer.state[model.linear.weight]["state1"].dtype == torch.uint8
    assert optimizer.state[model.linear.bias]["state1"].dtype == torch.float32  # below 4096 elements

    tied = Regression()
    tied.linear = nn.Linear(64, 80, bias=False)
    tied.linear.weight = tied.embedding.weight
    optimizer = create_optimizer(tied, OptimizerConfig(name=name), learning_rate=1e-3)
    train(tied, optimizer, 1)
    assert optimizer.state[tied.linear.weight]["state1"].dtype == torch.float32


def test_bitsandbytes_optimizers_leak_no_settings_into_each_other_or_the_process():
    from bitsandbytes.optim import GlobalOptimManager

    process_wide = GlobalOptimManager.get_instance()
    before = (
        dict(process_wide.pid2config),
        dict(process_wide.index2config),
    )  # a stock Trainer writes into them
    model, first = build("adamw_bnb_8bit")
    linear_only = nn.ModuleDict({"linear": model.linear})
    linear_only.linear.weight = model.embedding.weight  # the same parameter, in no embedding this time
    second = create_optimizer(linear_only, OptimizerConfig(name="adamw_bnb_8bit"), learning_rate=1e-3)
    model.embedding.weight.grad = torch.ones_like(model.embedding.weight)
    first.step()
    second.step()
    assert first.state[model.embedding.weight]["state1"].dtype == torch.float32
    assert second.state[model.embedding.weight]["state1"].dtype == torch.uint8
    assert (process_wide.pid2config, process_wide.index2config) == before


@pytest.mark.parametrize("name", BITSANDBYTES_8BIT)
def test_32_bit_embeddings_survive_accelerate(name):
    """Accelerate reloads the optimizer's state dict while wrapping it."""
    model, optimizer = build(name)
    AcceleratorState._reset_state(reset_partial_state=True)  # another test's settings
    train(model, Accelerator(cpu=True).prepare_optimizer(optimizer), 2)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert optimizer.state[model.embedding.weight]["state1"].dtype == torch.float32
    assert optimizer.state[model.linear.weight]["state1"].dtype == torch.uint8
