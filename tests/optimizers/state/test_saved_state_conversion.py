"""State written in one format goes on in another: exactly where both hold float32 weights in full."""

import itertools

import pytest
import torch
from torch import nn

from lowmem_ft.foundation.errors import CheckpointError
from lowmem_ft.optimizers import (
    OptimizerConfig,
    OptimizerState,
    create_optimizer,
    export_optimizer_state,
    import_optimizer_state,
)
from lowmem_ft.optimizers.table import optimizers_that

OWN_OPTIMIZERS = optimizers_that("takes_formats")
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
EXACT = [(FLOAT32, "fp32"), (BFLOAT16, "fp32"), (BFLOAT16, "split16")]
STATES = ("fp32", "bf16", "8bit")
MASTERS = [*EXACT, *((BFLOAT16, name) for name in ("split24", "stochastic_rounding", "none"))]


class Model(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.matrix = nn.Linear(70, 33)
        self.to(BFLOAT16).to(dtype)  # the same start for all types


def build(name="adamw", dtype=FLOAT32, master="fp32", state="fp32"):
    model = Model(dtype)
    config = OptimizerConfig(name=name, master=master, state=state, weight_decay=0.1)
    return model, create_optimizer(model, config, learning_rate=1e-3, seed=3)


def train(model, optimizer, steps):
    """Steps whose gradients do not depend on the weights, in float32 whatever those are."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad_dtype = None
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def float32_weights(model, optimizer):
    return [
        optimizer.master_of(p).read(p.detach().view(-1), optimizer.state[p]).clone()
        for p in model.parameters()
    ]


def hand_over(source, target):
    """What a checkpoint does: weights as they are in their type, the state beside them."""
    (model, optimizer), (new_model, new_optimizer) = source, target
    new_model.load_state_dict(model.state_dict())
    saved = {name: weight.clone() for name, weight in model.state_dict().items()}
    state = export_optimizer_state(optimizer, model.named_parameters())
    import_optimizer_state(new_optimizer, new_model.named_parameters(), state, saved.get)


@pytest.mark.parametrize("name,first,second", itertools.product(OWN_OPTIMIZERS, EXACT, EXACT))
def test_between_exact_formats_a_run_goes_on_bit_for_bit(name, first, second):
    straight = build(name, *first)
    train(*straight, range(8))
    source, target = build(name, *first), build(name, *second)
    train(*source, range(4))
    hand_over(source, target)
    train(*target, range(4, 8))
    for weight, expected in zip(float32_weights(*target), float32_weights(*straight), strict=True):
        assert torch.equal(weight, expected)


# How far a weight may be off, as a share of it, for having been kept in the coarser of two formats.
PRECISION = {
    "fp32": 0.0,
    "split16": 0.0,
    "split24": 2.0**-15,
    "stochastic_rounding": 2.0**-7,
    "none": 2.0**-8,
}


@pytest.mark.parametrize("first,second", itertools.product(MASTERS, MASTERS))
def test_any_master_is_taken_as_well_as_the_formats_hold_it(first, second):
    source, target = build("adamw", *first), build("adamw", *second)
    train(*source, range(4))
    before = float32_weights(*source)
    hand_over(source, target)
    for weight, expected in zip(float32_weights(*target), before, strict=True):
        torch.testing.assert_close(weight, expected, rtol=PRECISION[second[1]], atol=1e-30)


MIXED = {"exp_avg": "bf16", "exp_avg_sq": "8bit"}


@pytest.mark.parametrize(
    "first,second",
    [
        *itertools.product(STATES, STATES),
        ("fp32", MIXED),
        (MIXED, "fp32"),
        (MIXED, {"exp_avg": "8bit", "exp_avg_sq": "8bit"}),
        (MIXED, {}),
    ],
    ids=str,
)
def test_each_average_is_taken_as_well_as_its_formats_hold_it(first, second):
    source, target = build(state=first), build(state=second)
    train(*source, range(4))
    hand_over(source, target)
    for parameter, twin in zip(source[0].parameters(), target[0].parameters(), strict=True):
        assert target[1].state[twin]["step"] == 4
        before, after = source[1].averages_of(parameter), target[1].averages_of(twin)
        for name, form in before.items():
            value = form.read(source[1].state[parameter], name, parameter.numel())
            taken = after[name].read(target[1].state[twin], name, twin.numel())
            kept_as = second if isinstance(second, str) else second.get(name, "fp32")
            is_exact = kept_as == "fp32" or form == after[name]
            rtol = 0.0 if is_exact else {"bf16": 2.0**-7, "8bit": 1 / 8}[kept_as]
            floor = 2.0**-15 / 8 * value.abs().max().item() if rtol == 1 / 8 else 0.0
            torch.testing.assert_close(taken, value, rtol=rtol, atol=floor)


@pytest.mark.parametrize("first,second", itertools.product(EXACT, EXACT))
def test_torchs_own_state_dict_converts_too(first, second):
    source, target = build("adamw", *first), build("adamw", *second)
    train(*source, range(4))
    target[0].load_state_dict(source[0].state_dict())
    target[1].load_state_dict(source[1].state_dict())
    if first[0] == FLOAT32 != second[0]:  # the weights' lower halves are in no state dict
        for parameter, weight in zip(target[0].parameters(), float32_weights(*target), strict=True):
            assert torch.equal(weight, parameter.detach().float().view(-1))
        return
    for weight, expected in zip(float32_weights(*target), float32_weights(*source), strict=True):
        assert torch.equal(weight, expected)


def test_a_weight_that_is_at_hand_in_16_bits_alone_is_a_warning(caplog):
    source, (model, optimizer) = build("adamw", FLOAT32), build("adamw", BFLOAT16, "split16")
    train(*source, range(2))
    model.load_state_dict(source[0].state_dict())
    state = export_optimizer_state(source[1], source[0].named_parameters())
    import_optimizer_state(optimizer, model.named_parameters(), state)
    assert "saved in float32 but is available only in torch.bfloat16" in caplog.text


def test_a_missing_tensor_is_named():
    source, (model, optimizer) = (
        build(master="split24", dtype=BFLOAT16),
        build(master="split16", dtype=BFLOAT16),
    )
    train(*source, range(1))
    state = export_optimizer_state(source[1], source[0].named_parameters())
    tensors = {name: tensor for name, tensor in state.tensors.items() if name != "matrix.weight.low"}
    with pytest.raises(CheckpointError, match=r"no matrix\.weight\.low, .*master split24"):
        import_optimizer_state(
            optimizer, model.named_parameters(), OptimizerState(tensors=tensors, scalars=state.scalars)
        )
