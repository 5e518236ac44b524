"""State that was saved in parts, or whole, is taken by whoever holds other parts of it."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import nn

from lowmem_ft.foundation.errors import CheckpointError
from lowmem_ft.optimizers import (
    OptimizerConfig,
    OptimizerState,
    StateParts,
    create_optimizer,
    export_optimizer_state,
    import_optimizer_state,
)
from lowmem_ft.optimizers.formats.operators import BLOCK
from lowmem_ft.optimizers.formats.state_formats import BlockwiseState
from lowmem_ft.optimizers.state.state_parts import state_here

NUM_ELEMENTS = 23 * 36  # no multiple of a block


def trained(config, dtype):
    model = nn.Linear(36, 23, bias=False, dtype=dtype)
    optimizer = create_optimizer(model, config, learning_rate=1e-2, seed=0)
    for _ in range(3):
        model.weight.grad = torch.randn_like(model.weight)
        optimizer.step()
    return model, optimizer


def cut_at(tensor, bounds):
    pairs = list(itertools.pairwise(bounds))
    return StateParts([(first, tensor[first:end].clone()) for first, end in pairs], [e - f for f, e in pairs])


def random_bounds(unit=1):
    cuts = sorted(random.sample(range(1, -(-NUM_ELEMENTS // unit)), 3))
    return [0, *(cut * unit for cut in cuts), NUM_ELEMENTS]


FORMATS = [
    ("float32", "fp32", "fp32"),
    ("bfloat16", "fp32", "split16"),
    ("bfloat16", "bf16", "split24"),
    ("bfloat16", "bf16", "stochastic_rounding"),
    ("bfloat16", "fp32", "fp32"),
    ("bfloat16", {"exp_avg": "bf16", "exp_avg_sq": "fp32"}, "split24"),
]


@pytest.mark.parametrize("dtype,state,master", FORMATS)
def test_what_is_kept_by_element_is_put_together_to_the_bit(dtype, state, master):
    config = OptimizerConfig(state=state, master=master)
    model, optimizer = trained(config, getattr(torch, dtype))
    saved = export_optimizer_state(optimizer, model.named_parameters())
    tensors = {name: cut_at(tensor, random_bounds()) for name, tensor in saved.tensors.items()}
    other = nn.Linear(36, 23, bias=False, dtype=model.weight.dtype)
    other.load_state_dict(model.state_dict())
    takes = create_optimizer(other, config, learning_rate=1e-2, seed=0)
    import_optimizer_state(
        takes, other.named_parameters(), OptimizerState(tensors=tensors, scalars=saved.scalars)
    )
    taken = export_optimizer_state(takes, other.named_parameters())
    assert taken.tensors.keys() == saved.tensors.keys()
    assert all(torch.equal(taken.tensors[name], tensor) for name, tensor in saved.tensors.items())


def test_a_process_takes_its_elements_of_any_parts():
    whole = torch.arange(NUM_ELEMENTS)
    for _ in range(20):
        start, stop = sorted(random.sample(range(NUM_ELEMENTS), 2))
        assert torch.equal(cut_at(whole, random_bounds()).between(start, stop), whole[start:stop])
    assert cut_at(whole, random_bounds()).between(7, 7).numel() == 0


def blocks_of(values, bounds, form):
    """Codes and scales as processes keep them that hold these parts."""
    _, optimizer = trained(OptimizerConfig(state="8bit"), torch.float32)
    (parameter,) = optimizer.state
    codes, scales = [], []
    for first, end in itertools.pairwise(bounds):
        kept = {
            name: torch.zeros(length, dtype=dtype)
            for name, (length, dtype) in form.tensors("v", end - first).items()
        }
        form.write(values[first:end].clone(), kept, "v", optimizer.random_of(parameter, 3, first), 1)
        codes.append((first, kept["v"]))
        scales.append(kept["v_scale"])
    places = list(itertools.accumulate((len(scale) for scale in scales), initial=0))[:-1]
    return {
        "v": StateParts(codes, [len(part) for _, part in codes]),
        "v_scale": StateParts(list(zip(places, scales, strict=True)), [len(scale) for scale in scales]),
    }


def read(form, kept):
    return form.read(kept, "v", len(kept["v"]))


@pytest.mark.parametrize("signed", [True, False])
def test_blocks_that_go_on_are_taken_as_they_are_and_others_to_float32(signed):
    form = BlockwiseState(signed=signed)
    values = torch.randn(NUM_ELEMENTS) ** 3
    values = values if signed else values.abs()
    for unit, expected in ((BLOCK, "8bit"), (1, {"v": "fp32"})):
        bounds = [0, 2 * unit + (unit == 1), NUM_ELEMENTS]
        kept = blocks_of(values, bounds, form)
        apart = torch.cat(
            [
                read(form, {"v": part, "v_scale": scale})
                for (_, part), (_, scale) in zip(kept["v"].parts, kept["v_scale"].parts, strict=True)
            ]
        )
        here, kind = state_here(kept, {"v": form}, "8bit", 0, NUM_ELEMENTS)
        assert kind == expected
        assert torch.equal(here["v"] if kind != "8bit" else read(form, here), apart)
        start = bounds[1] + BLOCK  # a block of the second part begins there
        here, kind = state_here(kept, {"v": form}, "8bit", start, NUM_ELEMENTS)
        assert kind == "8bit"
        assert torch.equal(read(form, here), apart[start:])


def test_of_a_mixed_state_only_the_8_bit_average_is_read_where_blocks_begin_elsewhere():
    state = {"exp_avg": "8bit", "exp_avg_sq": "bf16"}
    _, optimizer = trained(OptimizerConfig(state=state), torch.float32)
    ((parameter, kept),) = optimizer.state.items()
    averages = optimizer.averages_of(parameter)
    tensors = {key: value for key, value in kept.items() if isinstance(value, torch.Tensor)}
    assert state_here(tensors, averages, state, BLOCK, NUM_ELEMENTS)[1] == state
    here, kinds = state_here(tensors, averages, state, 1, NUM_ELEMENTS)
    assert kinds == {"exp_avg": "fp32", "exp_avg_sq": "bf16"}
    assert torch.equal(here["exp_avg"], averages["exp_avg"].read(kept, "exp_avg", NUM_ELEMENTS)[1:])
    assert torch.equal(here["exp_avg_sq"], kept["exp_avg_sq"][1:])


def test_a_tensor_of_the_format_that_is_missing_is_named():
    config = OptimizerConfig(state="8bit")
    model, optimizer = trained(config, torch.float32)
    saved = export_optimizer_state(optimizer, model.named_parameters())
    tensors = {
        name: cut_at(tensor, [0, len(tensor)])
        for name, tensor in saved.tensors.items()
        if "_scale" not in name
    }
    with pytest.raises(
        CheckpointError, match=r"has no weight\.exp_avg\w*_scale, which its formats \(state 8bit"
    ):
        import_optimizer_state(
            optimizer, model.named_parameters(), OptimizerState(tensors=tensors, scalars=saved.scalars)
        )
