"""The Triton kernel in Triton's interpreter, beside the optimizer that runs without it."""

import copy
import itertools
import os

import numpy as np
import pytest
import torch
from sweeps import few_quick
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.tensors import triton_use
from lowmem_ft.foundation.tensors.gradient_slice import GradientSlice
from lowmem_ft.optimizers import OPTIMIZERS, ChunkedOptimizer
from lowmem_ft.optimizers import triton as with_kernel
from lowmem_ft.optimizers.triton.kernel_variants import variant_of
from lowmem_ft.optimizers.triton.triton_update import Launches
from lowmem_ft.optimizers.updates.adamw import AdamW
from lowmem_ft.optimizers.updates.lion import Lion
from lowmem_ft.optimizers.updates.sgd import SGD

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="Triton compiles where tests may need this machine's GPU: run with -m 'not gpu'",
)
pytest.importorskip("triton", reason="there is no Triton for this system")

MASTERS = ("weight", "fp32", "split16", "split24", "stochastic_rounding", "none")
STATES = ("fp32", "bf16", "8bit")


def lerp(start, end, part):
    part = torch.tensor(part, dtype=torch.float32)
    if part < 0.5:
        return start + (end - start) * part
    return end - (end - start) * (1 - part)


def adamw(weight, chunk, number, hp):
    g, m, v = chunk.gradient, chunk.averages["exp_avg"], chunk.averages["exp_avg_sq"]
    beta1, beta2 = hp["betas"]
    m.copy_(lerp(m, g, 1 - beta1))
    v.copy_(v * beta2 + (g * (1 - beta2)) * g)
    root = torch.from_numpy(np.sqrt(v.numpy()))  # torch's, from MKL, is not always the nearest
    denominator = root / (1 - beta2**number) ** 0.5 + hp["eps"]
    step = m * -(hp["lr"] / (1 - beta1**number)) / denominator
    weight.copy_(weight * (1 - hp["lr"] * hp["weight_decay"]) + step)


def lion(weight, chunk, number, hp):
    g, m = chunk.gradient, chunk.averages["momentum"]
    direction = lerp(g, m, hp["betas"][0]).sign()
    weight.copy_(weight * (1 - hp["lr"] * hp["weight_decay"]) - direction * hp["lr"])
    m.copy_(lerp(g, m, hp["betas"][1]))


def sgd(weight, chunk, number, hp):
    direction = chunk.gradient + weight * hp["weight_decay"]
    if "momentum_buffer" in chunk.averages:
        direction = chunk.averages["momentum_buffer"].mul_(hp["momentum"]).add_(direction)
    weight.copy_(weight + direction * -hp["lr"])


class Unfused:
    """A rule whose every operation is rounded by itself, as the kernel's are: torch's on the CPU fuse some of them."""

    def __init__(self, rule):
        self.rule = rule

    def averages(self, shape, hyperparameters):
        return self.rule.averages(shape, hyperparameters)

    def step(self, number, hyperparameters):
        update = {AdamW: adamw, Lion: lion, SGD: sgd}[type(self.rule)]
        return lambda weight, chunk: update(weight, chunk, number, hyperparameters)


def build(name, state, master, num_elements, kernel, unfused=True, seed=2**40 + 9, **hyperparameters):
    generator = torch.Generator().manual_seed(1)
    dtype = torch.float32 if master == "weight" else torch.bfloat16
    parameters = [
        nn.Parameter((torch.randn(n, generator=generator) * 0.02).to(dtype)) for n in (3, num_elements)
    ]
    rule = OPTIMIZERS[name].update_rule()
    defaults = {"lr": 1e-3, "weight_decay": 0.1, **OPTIMIZERS[name].hyperparameters, **hyperparameters}
    optimizer = ChunkedOptimizer(
        parameters,
        Unfused(rule) if kernel == "eager" and unfused else rule,
        defaults,
        state=state,
        master="fp32" if master == "weight" else master,
        seed=seed,
    )
    optimizer.kernel = kernel
    return optimizer


def train(optimizer, steps=3, dtype=torch.bfloat16, clip=0.37):
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters_of(optimizer):
            size = torch.randn(parameter.shape, generator=generator) * 4
            gradient = (
                (torch.randn(parameter.shape, generator=generator) * 2.0**size).clamp(-6e4, 6e4).to(dtype)
            )
            scale = None if clip is None else torch.tensor(clip)
            optimizer.update([GradientSlice(parameter, gradient)], scale=scale)
    return optimizer


def parameters_of(optimizer):
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def kept(optimizer):
    for number, parameter in enumerate(parameters_of(optimizer)):
        yield f"{number}.weight", parameter.detach()
        for name, value in optimizer.state[parameter].items():
            yield f"{number}.{name}", torch.as_tensor(value)


def assert_equal(found, expected):
    found, expected = dict(kept(found)), dict(kept(expected))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, equal_nan=True, msg=name)


def set_gradients(optimizer, *, is_finite):
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.full_like(parameter, 0.5 if is_finite else torch.inf)
    optimizer.gradient_factor = torch.tensor(0.25 if is_finite else torch.nan)
    optimizer.is_finite = lambda: is_finite


@pytest.mark.parametrize(
    "name,state,master",
    [("adamw", "8bit", "split24"), ("lion", "bf16", "stochastic_rounding"), ("sgd", "fp32", "weight")],
)
def test_a_step_that_is_not_finite_writes_nothing_and_does_not_count(name, state, master):
    tried, spared = (train(build(name, state, master, 1324, "triton", seed=3)) for _ in range(2))
    set_gradients(tried, is_finite=False)
    tried.step()
    assert_equal(tried, spared)
    for optimizer in (tried, spared):
        set_gradients(optimizer, is_finite=True)
        optimizer.step()
    assert_equal(tried, spared)


def test_it_is_asked_before_anything_but_the_kernel_changes_a_weight(monkeypatch):
    optimizer = train(build("adamw", "8bit", "split24", 1324, "triton"))
    before = copy.deepcopy(dict(kept(optimizer)))
    launched, launch = [], Launches.launch
    monkeypatch.setattr(Launches, "launch", lambda *a: launched.append(launch(*a)))
    set_gradients(optimizer, is_finite=False)
    _, second = optimizer.param_groups[0]["params"]
    second.grad = torch.full((1324, 2), torch.inf, dtype=second.dtype)[:, 0]  # not contiguous
    asked_after = []
    optimizer.is_finite = lambda: asked_after.append(len(launched)) or False
    optimizer.step()
    assert asked_after[0] == 1, "the first parameter is launched, the second waits for the answer"
    assert len(launched) == 1
    for name, value in kept(optimizer):
        assert torch.equal(value, before[name]), name


SIZES = {case: [1024 + 300] for case in itertools.product(("adamw", "lion", "sgd"), STATES, MASTERS)}
"""Elements: of any rule and format two programs, the second with a tail; of some every edge of a block."""
for case in (
    ("adamw", "8bit", "split24"),
    ("lion", "bf16", "stochastic_rounding"),
    ("sgd", "fp32", "weight"),
):
    SIZES[case] = [1, 255, 256, 257, 4 * 1024 + 300]


def is_quick(name, state, master):
    """Of most formats those in which any two of the three meet."""
    place = ("adamw", "lion", "sgd").index(name) + list(MASTERS).index(master)
    return len(SIZES[name, state, master]) > 1 or list(STATES).index(state) == place % len(STATES)


@pytest.mark.parametrize("name,state,master", few_quick(SIZES, [case for case in SIZES if is_quick(*case)]))
def test_every_rule_and_format_gives_the_bits_of_the_operations(name, state, master):
    for num_elements in SIZES[name, state, master]:
        found, expected = (
            build(name, state, master, num_elements, kernel) for kernel in ("untried", "eager")
        )
        assert_equal(train(found, steps=2), train(expected, steps=2))


@pytest.mark.parametrize("first,second", [("bf16", "fp32"), ("fp32", "8bit"), ("8bit", "bf16")])
def test_averages_in_formats_of_their_own_give_the_bits_of_the_operations(first, second):
    state = {"exp_avg": first, "exp_avg_sq": second}
    found, expected = (build("adamw", state, "split24", 700, kernel) for kernel in ("untried", "eager"))
    assert_equal(train(found, steps=2), train(expected, steps=2))


@pytest.mark.parametrize("master", ["fp32", "split16", "split24"])
def test_weights_that_somebody_writes_give_the_bits_of_the_operations(master):
    found, expected = (build("adamw", "fp32", master, 700, kernel) for kernel in ("untried", "eager"))
    for optimizer in (found, expected):
        weight = train(optimizer).param_groups[0]["params"][1]
        weight.data[:300].mul_(0)  # of both signs
        weight.data[300:500].neg_()
        weight.data[500:600].fill_(torch.inf)
        weight.data[600:650].mul_(1 + 2**-7)  # by one unit or two
        train(optimizer)
    assert_equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gradients_of_any_type_with_and_without_clipping(dtype):
    for clip in (None, 0.5):
        found, expected = (build("adamw", "8bit", "split24", 700, kernel) for kernel in ("untried", "eager"))
        assert_equal(train(found, dtype=dtype, clip=clip), train(expected, dtype=dtype, clip=clip))


@pytest.mark.parametrize(
    "name,hyperparameters",
    [
        ("adamw", {"betas": (0.3, 0.9), "weight_decay": 0.0}),
        ("adamw", {"betas": (0.0, 0.0)}),
        ("lion", {"betas": (0.2, 0.4)}),
        ("sgd", {"momentum": 0.0}),
    ],
)
def test_hyperparameters_that_take_another_way(name, hyperparameters):
    pair = (build(name, "fp32", "split16", 600, kernel, **hyperparameters) for kernel in ("untried", "eager"))
    found, expected = pair
    assert_equal(train(found), train(expected))


def test_chunks_change_no_bit():
    whole = train(build("adamw", "8bit", "split24", 4 * 1024 + 300, "untried"))
    chunked = build("adamw", "8bit", "split24", 4 * 1024 + 300, "untried")
    chunked.chunk_elements = 768
    assert_equal(train(chunked), whole)


def by_operations(optimizer):
    optimizer.kernel, optimizer.rule = "eager", Unfused(AdamW())


def other_memory(optimizer):
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.data = torch.stack([parameter.data, parameter.data], 1)[:, 0]  # not contiguous


def other_weights(optimizer):
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.data = -parameter.data
    optimizer.adopt_weights()


def of_another_run(optimizer):
    """Averages of other steps than its own, and their number."""
    parameters, size = parameters_of(optimizer), parameters_of(optimizer)[1].numel()
    other = build("adamw", "8bit", "split24", size, "eager")
    for parameter, theirs in zip(parameters, parameters_of(train(other, steps=2)), strict=True):
        parameter.data.copy_(theirs)
    optimizer.load_state_dict(copy.deepcopy(other.state_dict()))


def another_group(optimizer):
    parameter = nn.Parameter(torch.linspace(-1, 1, 600).bfloat16())
    optimizer.add_param_group({"params": [parameter], "lr": 0.01})


def another_seed(optimizer):
    optimizer.seed += 1


CHANGES = {
    "learning rate": lambda optimizer: optimizer.param_groups[0].update(lr=0.5),
    "chunks": lambda optimizer: setattr(optimizer, "chunk_elements", 768),
    "operations": by_operations,
    "loaded": lambda optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    "loaded from another run": of_another_run,
    "a group": another_group,
    "betas": lambda optimizer: optimizer.param_groups[0].update(betas=(0.3, 0.9)),
    "seed": another_seed,
    "a hook": lambda optimizer: optimizer.register_update_hook(lambda *arguments: None),
    "memory": other_memory,
    "weights": other_weights,
}


class Handle:
    """A compiled kernel, as Triton hands it out: it gets all arguments by their places, and bfloat16 as it is."""

    def __init__(self, kernel):
        self.kernel, self.num_launches = kernel, 0

    def __getitem__(self, grid):
        def launch(*arguments):
            self.num_launches += 1
            self.kernel[grid](*(one.view(torch.int16) if is_half(one) else one for one in arguments))

        return launch


class Compiler:
    """The kernel, whose launches hand out a compiled one: here it is interpreted, too."""

    def __init__(self, kernel):
        self.kernel, self.handles, self.arg_names = kernel, [], kernel.arg_names

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.kernel[grid](*arguments, **options)
            self.handles.append(Handle(self.kernel))
            return self.handles[-1]

        return launch


def is_half(argument):
    return isinstance(argument, torch.Tensor) and argument.dtype == torch.bfloat16


@pytest.fixture
def compiler(monkeypatch):
    kernel = Compiler(with_kernel.update_chunk)
    monkeypatch.setattr(with_kernel, "update_chunk", kernel, raising=False)
    variant_of.cache_clear()
    yield kernel
    variant_of.cache_clear()


@pytest.mark.parametrize("name,state,master", [("adamw", "8bit", "split24"), ("lion", "bf16", "fp32")])
def test_a_compiled_kernel_gives_the_same_bits_and_is_looked_up_once(compiler, name, state, master):
    found, expected = (build(name, state, master, 4 * 1024 + 304, kernel) for kernel in ("untried", "eager"))
    assert_equal(train(found, steps=3), train(expected, steps=3))
    assert [handle.num_launches for handle in compiler.handles] == [2, 2], (
        "3 elements are no vectors, 4400 are"
    )


def test_an_address_that_is_not_aligned_needs_a_variant_of_its_own(compiler):
    found, expected = (build("adamw", "8bit", "split24", 608, kernel) for kernel in ("untried", "eager"))
    for optimizer in (train(found), train(expected)):
        parameter = parameters_of(optimizer)[1]
        gradient = torch.linspace(-1, 1, 609).bfloat16()[1:]
        optimizer.update([GradientSlice(parameter, gradient)], scale=torch.tensor(0.37))
    assert_equal(train(found), train(expected))
    assert len(compiler.handles) == 3, "the third is not kept: Triton finds it for itself"
    assert compiler.handles[1].num_launches == 2 + 3


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_steps_counts_in_the_next_launch_of_a_compiled_kernel(change):
    check_change(change)


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_steps_counts_in_the_next(change):
    check_change(change)


def check_change(change):
    pair = [build("adamw", "8bit", "split24", 4 * 1024 + 300, kernel) for kernel in ("untried", "eager")]
    for optimizer in pair:
        CHANGES[change](train(optimizer))
    assert_equal(*map(train, pair))


class Names(TorchDispatchMode):
    """The names of operators."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def test_whoever_watches_operators_sees_the_update(compiler):
    found, expected = (build("adamw", "8bit", "split24", 700, kernel) for kernel in ("untried", "eager"))
    train(found)
    with Names() as watched:
        train(found)
    assert "lowmem_ft::update_in_triton" in watched.names
    assert_equal(found, train(train(expected)))


def test_nan_stays_in_its_block():
    found, expected = (build("adamw", "8bit", "split24", 1000, kernel) for kernel in ("untried", "eager"))
    for optimizer in (found, expected):
        parameter = optimizer.param_groups[0]["params"][1]
        gradient = torch.ones(1000, dtype=torch.bfloat16)
        gradient[300] = float("nan")
        optimizer.update([GradientSlice(parameter, gradient)])
    first, second = (optimizer.param_groups[0]["params"][1].detach() for optimizer in (found, expected))
    assert torch.isnan(first).nonzero().tolist() == [[300]]
    assert torch.equal(first.isnan(), second.isnan())
    for name in ("exp_avg_scale", "exp_avg_sq_scale"):
        scale = found.state[found.param_groups[0]["params"][1]][name]
        assert scale.isnan().tolist() == [False, True, False, False]


@pytest.fixture
def tried_anew(monkeypatch):
    monkeypatch.setattr(triton_use, "_works", {})


@pytest.mark.usefixtures("tried_anew")
@pytest.mark.parametrize("clip", [None, 0.37])
@pytest.mark.parametrize("num_elements", [1024, 700], ids=["in vectors", "with a tail"])
@pytest.mark.parametrize("name", ["adamw", "lion", "sgd"])
def test_the_kernel_passes_its_trial(name, num_elements, clip):
    train(build(name, "8bit", "split24", num_elements, "triton"), clip=clip)
    assert set(triton_use._works.values()) == {True}


@pytest.mark.usefixtures("tried_anew")
@pytest.mark.parametrize("master", MASTERS)
def test_a_kernel_that_leaves_weights_alone_fails_its_trial_in_a_warm_up_too(master, monkeypatch):
    """Whose first rate is 0: with that no weight would change, whoever updates it."""

    def idle(self, weight, gradient, kept, *others):
        masters = {name: kept[name].clone() for name in ("master", "low") if name in kept}
        launch(self, weight.clone(), gradient, {**kept, **masters}, *others)

    launch = Launches.launch
    monkeypatch.setattr(Launches, "launch", idle)
    optimizer = build("adamw", "fp32", master, 600, "triton", lr=0.0)
    with pytest.raises(UserError, match="computes a different weight from torch's operations"):
        train(optimizer, steps=1)
