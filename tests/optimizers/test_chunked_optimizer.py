"""Chunks, slices and homes change no bit; temporaries stay a few chunks large."""

import itertools
from collections.abc import Iterable, Iterator, Mapping

import pytest
import torch
from torch import Tensor, nn

from lowmem_ft.foundation.tensors.gradient_slice import GradientSlice
from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker
from lowmem_ft.optimizers import OPTIMIZERS, ChunkedOptimizer
from lowmem_ft.optimizers.table import optimizers_that

OWN_OPTIMIZERS = optimizers_that("takes_formats")
MASTERS = ("fp32", "split16", "split24", "stochastic_rounding", "none")
STATES = ("fp32", "bf16", "8bit")
ELEMENTWISE = optimizers_that("updates_by_slices")


def build(
    name="adamw", *, state="fp32", master="fp32", dtype=torch.bfloat16, shapes=((40, 50), (3,), (1111,))
):
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    defaults = {"lr": 1e-3, "weight_decay": 0.1, **OPTIMIZERS[name].hyperparameters}
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 2e-3}]
    return ChunkedOptimizer(
        groups, OPTIMIZERS[name].update_rule(), defaults, state=state, master=master, seed=5
    )


def parameters_of(optimizer):
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def gradients(optimizer, step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in parameters_of(optimizer)]


def take_steps(optimizer, num_steps=4, first=0):
    for step in range(first, first + num_steps):
        for parameter, gradient in zip(parameters_of(optimizer), gradients(optimizer, step), strict=True):
            parameter.grad = gradient
        optimizer.step()


def assert_equal(first, second):
    """Weights and all state, bit for bit."""
    for parameter, twin in zip(parameters_of(first), parameters_of(second), strict=True):
        assert torch.equal(parameter, twin)
        assert first.state[parameter].keys() == second.state[twin].keys()
        for name, value in first.state[parameter].items():
            other = second.state[twin][name]
            assert torch.equal(value, other) if isinstance(value, Tensor) else value == other, name


@pytest.mark.parametrize("name,state,master", itertools.product(ELEMENTWISE, STATES, MASTERS))
def test_the_size_of_chunks_changes_no_bit(name, state, master):
    whole = build(name, state=state, master=master)
    take_steps(whole)
    for chunk_elements in (256, 768):
        chunked = build(name, state=state, master=master)
        chunked.chunk_elements = chunk_elements
        take_steps(chunked)
        assert_equal(chunked, whole)


MIXED = {"exp_avg": "bf16", "exp_avg_sq": "8bit"}


@pytest.mark.parametrize("state,master", [*itertools.product(STATES, MASTERS), (MIXED, "fp32")])
def test_updating_slice_by_slice_is_a_step(state, master):
    stepped, sliced = build(state=state, master=master), build(state=state, master=master)
    take_steps(stepped)
    sliced.chunk_elements = 256
    unit = sliced.slice_unit
    for step in range(4):
        for parameter, gradient in zip(parameters_of(sliced), gradients(sliced, step), strict=True):
            flat = gradient.view(-1)
            middle = flat.numel() // 2 // unit * unit
            for start, stop in ((0, middle), (middle, flat.numel())):
                sliced.update(
                    [GradientSlice(parameter, flat[start:stop].clone(), start)] if stop > start else []
                )
    assert_equal(sliced, stepped)


def test_each_average_is_kept_as_if_all_were_in_its_format():
    """Here an average depends on its gradients alone: it has the same bits whatever the other one is kept in."""
    alone = {state: build(state=state, master="split24") for state in STATES}
    for optimizer in alone.values():
        take_steps(optimizer)
    for formats in itertools.permutations(STATES, 2):
        mixed = build(state=dict(zip(("exp_avg", "exp_avg_sq"), formats, strict=True)), master="split24")
        take_steps(mixed)
        for place, parameter in enumerate(parameters_of(mixed)):
            for name, state in zip(("exp_avg", "exp_avg_sq"), formats, strict=True):
                twin = alone[state]
                form, expected = mixed.averages_of(parameter)[name], twin.state[parameters_of(twin)[place]]
                assert form == twin.averages_of(parameters_of(twin)[place])[name]
                for key in form.tensors(name, parameter.numel()):
                    assert torch.equal(mixed.state[parameter][key], expected[key]), (formats, key)


def test_formats_of_averages_that_a_rule_does_not_have_are_refused():
    with pytest.raises(
        ValueError, match=r"AdamW keeps exp_avg and exp_avg_sq of a .* got a format of momentum"
    ):
        build(state={"momentum": "bf16"})
    with pytest.raises(ValueError, match="Adafactor keeps no average of a parameter of shape"):
        build("adafactor", state={"exp_avg_sq": "bf16"})


@pytest.mark.parametrize("starts", [(0, 1000, 2000), (2000, 1000, 0), (1000, 2000, 0)])
def test_slices_in_any_order_are_one_step(starts):
    at_once, sliced = build(shapes=((3000,),)), build(shapes=((3000,),))
    for step in range(3):
        gradient = torch.randn(3000, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
        for optimizer, slices in (
            (at_once, [(0, 3000)]),
            (sliced, [(start, start + 1000) for start in starts]),
        ):
            (parameter,) = parameters_of(optimizer)
            for start, stop in slices:
                optimizer.update([GradientSlice(parameter, gradient[start:stop].clone(), start)])
            assert optimizer.state[parameter]["step"] == step + 1
    assert torch.equal(*(parameters_of(optimizer)[0] for optimizer in (at_once, sliced)))


def test_the_step_number_goes_up_with_the_last_element():
    optimizer = build()
    parameter = parameters_of(optimizer)[0]
    optimizer.update([GradientSlice(parameter, torch.ones(1000))])
    assert optimizer.state[parameter]["step"] == 0
    optimizer.update([GradientSlice(parameter, torch.ones(1000), start=1000)])
    assert optimizer.state[parameter]["step"] == 1


@pytest.mark.parametrize("start,num_elements", [(100, 256), (0, 300), (1024, 1000)])
def test_8_bit_slices_are_whole_blocks(start, num_elements):
    optimizer = build(state="8bit")
    parameter = parameters_of(optimizer)[0]
    with pytest.raises(ValueError, match="multiples of 256"):
        optimizer.update([GradientSlice(parameter, torch.ones(num_elements), start)])


@pytest.mark.parametrize("name", OWN_OPTIMIZERS)
def test_scale_multiplies_the_gradients_in_float32(name):
    scaled, plain = build(name, dtype=torch.float32), build(name, dtype=torch.float32)
    for step in range(3):
        factor = torch.tensor(0.37 / (step + 1))
        scaled.update(
            [
                GradientSlice(p, g)
                for p, g in zip(parameters_of(scaled), gradients(scaled, step), strict=True)
            ],
            scale=factor,
        )
        plain.update(
            [
                GradientSlice(p, g * factor)
                for p, g in zip(parameters_of(plain), gradients(plain, step), strict=True)
            ]
        )
    assert_equal(scaled, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_multiplies_gradients_in_float32_by_its_factor_and_forgets_it(dtype):
    clipped, multiplied = build(dtype=dtype), build(dtype=dtype)
    for number, factor in enumerate((0.3, 1.0, 0.7)):
        clipped.gradient_factor = torch.tensor(factor) if factor != 1 else None
        for parameter, gradient in zip(parameters_of(clipped), gradients(clipped, number), strict=True):
            parameter.grad = gradient
        clipped.step()
        assert clipped.gradient_factor is None
        wide = [gradient.float() * factor for gradient in gradients(multiplied, number)]
        multiplied.update(map(GradientSlice, parameters_of(multiplied), wide))
    assert_equal(clipped, multiplied)


def test_the_factor_goes_with_the_gradients():
    optimizer = build()
    optimizer.gradient_factor = torch.tensor(0.5)
    optimizer.zero_grad()
    assert optimizer.gradient_factor is None


def test_an_update_that_was_put_off_takes_the_hyperparameters_of_its_step():
    late, on_time = build(), build()
    take_steps(on_time, 1)
    of_its_step = {index: dict(group) for index, group in enumerate(late.param_groups)}
    for group in late.param_groups:
        group["lr"] = 100.0
    slices = [GradientSlice(p, g) for p, g in zip(parameters_of(late), gradients(late, 0), strict=True)]
    late.update(slices, hyperparameters=of_its_step)
    assert_equal(late, on_time)


@pytest.mark.parametrize("name,state,master", itertools.product(("adamw",), STATES, MASTERS))
def test_a_step_makes_nothing_larger_than_a_few_chunks(name, state, master):
    """Twelve float32 chunks at the most, for a parameter of 64."""
    optimizer = build(name, state=state, master=master, shapes=((64, 4096), (5,)))
    optimizer.chunk_elements = 4096
    optimizer.allocate_state()
    for parameter in parameters_of(optimizer):
        parameter.grad = torch.randn_like(parameter)
    with StorageTracker() as tracker:
        optimizer.step()
    assert tracker.live_bytes == 0
    assert tracker.peak_bytes <= 12 * 4 * 4096


STATE_BYTES = {"fp32": 8, "bf16": 4, "8bit": 2 + 8 / 256}
MASTER_BYTES = {"fp32": 4, "split16": 2, "split24": 1, "stochastic_rounding": 0, "none": 0}


@pytest.mark.parametrize("state,master", itertools.product(STATES, MASTERS))
def test_allocating_state_takes_the_bytes_that_the_formats_say_and_a_step_keeps_no_more(state, master):
    optimizer = build(state=state, master=master, shapes=((64, 256), (256,)))
    with StorageTracker() as tracker:
        optimizer.allocate_state()
        assert tracker.live_bytes == (STATE_BYTES[state] + MASTER_BYTES[master]) * 65 * 256
        take_steps(optimizer, 1)
    held = [value for s in optimizer.state.values() for value in s.values() if isinstance(value, Tensor)]
    assert sum(tensor.nbytes for tensor in held) == (STATE_BYTES[state] + MASTER_BYTES[master]) * 65 * 256


class FarHome:
    """A home whose chunks visit as copies, one ahead of the update, as a host beside a GPU would have them."""

    def __init__(self):
        self.allocated = 0

    def allocate(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.allocated += 1
        return torch.zeros(num_elements, dtype=dtype)

    def visit(
        self, chunks: Iterable[Mapping[str, Tensor]], device: torch.device
    ) -> Iterator[dict[str, Tensor]]:
        chunks = iter(chunks)
        ahead = next(chunks, None)
        while ahead is not None:
            there, ahead = ahead, None
            here = {name: tensor.clone() for name, tensor in there.items()}
            ahead = next(chunks, None)
            yield here
            for name, tensor in there.items():
                tensor.copy_(here[name])


@pytest.mark.parametrize(
    "name,state,master", [*itertools.product(OWN_OPTIMIZERS, STATES, ("split24", "fp32"))]
)
def test_state_may_live_elsewhere(name, state, master):
    near, far = (build(name, state=state, master=master) for _ in range(2))
    far.home = FarHome()
    far.chunk_elements = near.chunk_elements = 512
    take_steps(near)
    take_steps(far)
    assert_equal(far, near)
    assert far.home.allocated >= 3


@pytest.mark.parametrize("name", OWN_OPTIMIZERS)
def test_a_transposed_weight_is_updated_in_place(name):
    start = torch.randn(50, 40)
    straight, turned = nn.Parameter(start.clone()), nn.Parameter(start.t().contiguous().t())
    assert not turned.is_contiguous()
    defaults = {"lr": 1e-3, "weight_decay": 0.1, **OPTIMIZERS[name].hyperparameters}
    for parameter in (straight, turned):
        optimizer = ChunkedOptimizer([parameter], OPTIMIZERS[name].update_rule(), defaults)
        for step in range(3):
            parameter.grad = torch.randn(50, 40, generator=torch.Generator().manual_seed(step))
            optimizer.step()
    assert not turned.is_contiguous()
    assert torch.equal(turned, straight)


@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize("master", MASTERS)
def test_weights_changed_from_outside_are_what_the_next_step_starts_from(master, is_told):
    """Even where torch keeps no count of it; whole or in part, to zeros of either sign, which have no lower bits."""
    optimizer = build(master=master)
    take_steps(optimizer, 2)
    first, second, third = parameters_of(optimizer)
    first.data.mul_(-0.5)
    second.data.fill_(3.0)
    third.data[:500].mul_(0)  # of both signs
    written = [parameter.detach().clone() for parameter in parameters_of(optimizer)]
    if is_told:
        optimizer.adopt_weights()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    take_steps(optimizer, 1, first=2)
    assert all(map(torch.equal, parameters_of(optimizer), written))


def test_hooks_see_each_slice_before_and_after_its_update():
    optimizer = build(master="none", shapes=((4, 5), (6,), (2,)))
    seen = []

    def hook(parameter, start, weight, gradient, hyperparameters):
        before = weight.clone()
        assert weight.shape == gradient.shape == (gradient.numel(),)
        return lambda: seen.append((parameter, start, hyperparameters["lr"], bool((weight != before).any())))

    handle = optimizer.register_update_hook(hook)
    first, second, third = parameters_of(optimizer)
    optimizer.update([GradientSlice(first, torch.ones(10), 10), GradientSlice(second, torch.ones(6))])
    assert [(id(p), *rest) for p, *rest in seen] == [(id(first), 10, 1e-3, True), (id(second), 0, 2e-3, True)]
    handle.remove()
    optimizer.update([GradientSlice(third, torch.ones(2))])
    assert len(seen) == 2


def test_parameters_without_gradient_are_left_alone():
    optimizer = build()
    first, second, _ = parameters_of(optimizer)
    first.grad = torch.ones_like(first)
    before = second.detach().clone()
    optimizer.step()
    assert torch.equal(second, before)
    assert second not in optimizer.state


def test_other_seeds_round_otherwise():
    results = []
    for seed in (5, 6):
        optimizer = build(master="stochastic_rounding")
        optimizer.seed = seed
        take_steps(optimizer)
        results.append(parameters_of(optimizer)[0].detach())
    assert not torch.equal(*results)
