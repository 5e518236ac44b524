"""Sums inside products: as a float32 product adds them, nearer to the truth, in each order, next to each technique.

Sums are in float32, or in the weights' type, bfloat16.
"""

from __future__ import annotations

import functools

import pytest
import torch
from ground_truth.ladder_run import outcome_of
from measuring.families import FAMILIES
from sweeps import few_quick
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.recipe import load_recipe
from lowmem_ft.techniques.accumulation.float32_accumulation import enable_float32_accumulation
from lowmem_ft.techniques.accumulation.fused_accumulation import enable_fused_accumulation
from lowmem_ft.techniques.gradients.gradient_sums_in_products import add_product_
from lowmem_ft.techniques.gradients.weight_gradient import WeightGradient
from lowmem_ft.techniques.loss.linear_cross_entropy import linear_cross_entropy_sum

CPU = torch.device("cpu")
MICRO_BATCHES = 16
SUMS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def mlp(*, bias=False):
    torch.manual_seed(0)
    layers = nn.Linear(24, 40, bias=bias), nn.SiLU(), nn.Linear(40, 24, bias=bias)
    return nn.Sequential(*layers).to(torch.bfloat16)


def inputs():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 8, 24, generator=generator).bfloat16() for _ in range(MICRO_BATCHES)]


def in_float32(model):
    return enable_float32_accumulation(torch.optim.SGD(model.parameters()), takes_float32=True)


def fused(model, dtype=torch.float32):
    if dtype == torch.float32:
        in_float32(model)
    return enable_fused_accumulation(model, device=CPU)


def shares():
    """Yield the factors of each micro-batch's share of a linear layer's gradient."""
    generator = torch.Generator().manual_seed(2)
    for x in inputs():
        yield torch.randn(2, 8, 40, generator=generator).bfloat16(), x


def gradients(model, call=lambda model, x: model(x)):
    for x in inputs():
        call(model, x).float().square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@SUMS
def test_a_sum_is_that_of_float32_products_of_the_same_factors(dtype):
    """One in bfloat16 is rounded once a micro-batch, after the addition."""
    model, linear = mlp(), nn.Linear(24, 40, bias=False, dtype=torch.bfloat16)
    linear.load_state_dict(model[0].state_dict())
    fused(linear, dtype)
    expected = torch.zeros(40, 24, dtype=dtype)
    for d_output, x in shares():
        linear(x).backward(d_output)
        expected = torch.addmm(expected.float(), d_output.flatten(0, 1).float().t(), x.flatten(0, 1).float())
        expected = expected.to(dtype)
    assert linear.weight.grad.dtype == dtype
    assert torch.equal(linear.weight.grad, expected)


@pytest.mark.parametrize("dtype,least_gain", [(torch.float32, 1000), (torch.bfloat16, 1)])
def test_a_sum_is_nearer_to_the_truth_than_one_of_rounded_products(dtype, least_gain):
    rounded, unrounded, exact = mlp(), mlp(), mlp().double()
    if dtype == torch.float32:
        in_float32(rounded)
    fused(unrounded, dtype)
    for d_output, x in shares():
        rounded[0](x).backward(d_output)
        unrounded[0](x).backward(d_output)
        exact[0](x.double()).backward(d_output.double())
    truth = exact[0].weight.grad
    errors = [(model[0].weight.grad - truth).norm() / truth.norm() for model in (rounded, unrounded)]
    assert errors[1] < errors[0] / least_gain


@pytest.mark.parametrize("bias", [False, True])
def test_outputs_and_the_inputs_gradients_keep_their_bits(bias):
    def seen(model):
        x = inputs()[0].requires_grad_()
        output = model(x)
        output.mul_(2)  # as a model may
        output.float().square().sum().backward()
        return output, x.grad, *(layer.bias.grad for layer in model if bias and hasattr(layer, "bias"))

    stock, ours = mlp(bias=bias), mlp(bias=bias)
    in_float32(stock)
    fused(ours)
    assert all(map(torch.equal, seen(stock), seen(ours)))


def test_a_layer_used_twice_sums_both_and_its_hook_runs_once_after_them():
    """As in vertical order, whose updates in backward wait for a weight's last use."""
    model, called = mlp(), []
    fused(model)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: called.append(p.grad.clone()))
    x = inputs()[0]
    sum(model(x).float().sum() for _ in range(3)).backward()
    once = mlp()
    fused(once)
    once(x).float().sum().backward()
    assert len(called) == 2
    torch.testing.assert_close(called[::-1], [3 * parameter.grad for parameter in once.parameters()])


def test_a_weight_that_is_used_otherwise_too_gets_both_gradients():
    """As the tied weight of an embedding and a head."""
    model = mlp()
    fused(model)
    x = inputs()[0]
    (model[0](x).float().sum() + F.linear(x, model[0].weight).float().sum()).backward()
    expected = 2 * x.flatten(0, 1).float().sum(0).expand(40, 24)
    torch.testing.assert_close(
        model[0].weight.grad, expected, atol=0.03, rtol=0
    )  # autograd's half is rounded


def test_recomputation_stops_before_the_last_product():
    """What is saved last is saved before it, as by torch's own linear layers: else each layer is computed once more."""

    def products(model):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            gradients(model, lambda model, x: checkpoint(model, x.requires_grad_(), use_reentrant=False))
        return sum(
            event.count for event in profile.key_averages() if event.key in ("aten::mm", "aten::addmm_")
        )

    stock, ours = mlp(), mlp()
    in_float32(stock)
    fused(ours)
    assert products(ours) == products(stock)


@SUMS
def test_a_head_adds_each_chunk_to_its_sum(dtype):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(50, 16, generator=generator).bfloat16()
    labels = torch.randint(0, 300, (50,), generator=generator)
    weights = [torch.randn(300, 16, generator=generator).bfloat16()] * 2
    weights = [nn.Parameter(weight.clone()) for weight in weights]
    weights.append(nn.Parameter(weights[0].detach().double()))
    for weight in weights:
        weight.grad_dtype = torch.promote_types(weight.dtype, dtype)
    for _ in range(4):
        for weight, sums in zip(weights, (False, True, False), strict=True):
            loss = linear_cross_entropy_sum(
                hidden.to(weight.dtype),
                weight,
                labels,
                chunk_tokens=16,
                vocabulary_tiles=2,
                sums_in_product=sums,
            )
            loss.backward()
    rounded, unrounded, truth = (weight.grad for weight in weights)
    assert unrounded.dtype == dtype
    assert (unrounded - truth).norm() < (rounded - truth).norm()


def test_a_heads_sum_refuses_a_scaled_loss():
    weight = nn.Parameter(torch.randn(300, 16).bfloat16())
    weight.grad_dtype = torch.float32
    hidden, labels = torch.randn(8, 16).bfloat16().requires_grad_(), torch.arange(8)
    loss = linear_cross_entropy_sum(hidden, weight, labels, chunk_tokens=16, sums_in_product=True)
    with pytest.raises(RuntimeError, match="unscaled loss"):
        (2 * loss).backward()


@pytest.mark.parametrize("chunk", [1, 16], ids=["its factors are kept", "they would take more than a sum"])
@SUMS
def test_a_gradient_of_chunks_adds_to_a_sum_it_is_given(dtype, chunk):
    """One in bfloat16 is rounded once, after all chunks."""
    generator = torch.Generator().manual_seed(0)
    total = torch.randn(12, 8, generator=generator).to(dtype)
    expected = total.float()
    gradient = WeightGradient(total.shape, torch.bfloat16, CPU, 4 * chunk, total)
    for _ in range(4):
        d_output, x = (torch.randn(chunk, size, generator=generator).bfloat16() for size in (12, 8))
        gradient.add(d_output, x)
        add_product_(expected, d_output, x)
    assert gradient.finish() is total
    assert torch.equal(total, expected.to(dtype))


def test_remove_gives_the_layers_their_forward_back():
    model = mlp()
    handle = fused(model)
    handle.remove()
    assert all("forward" not in vars(module) for module in model.modules())


def test_weights_without_16_bits_and_hooks_that_want_a_gradient_are_refused():
    with pytest.raises(UserError, match="has none"):
        enable_fused_accumulation(mlp().float(), device=CPU)
    model = mlp()
    model[0].weight.register_hook(lambda gradient: gradient)
    with pytest.raises(UserError, match=r"0\.weight"):
        fused(model)


def test_a_device_without_such_products_is_refused(monkeypatch):
    monkeypatch.setattr(
        "lowmem_ft.techniques.accumulation.fused_accumulation.add_product_", lambda *tensors: None
    )
    with pytest.raises(UserError, match="gets another sum"):
        fused(mlp())


# --- in runs ---------------------------------------------------------------------------------------------------------

FULL = ("checkpointing.mode=full",)
IN_BACKWARD = (*FULL, "accumulation.order=vertical", "optimizer.in_backward=true")
NEIGHBOURS = {
    "alone": (),
    "in the weights' type": ("accumulation.dtype=weights",),
    "checkpointed": FULL,
    "selective": ("checkpointing.mode=selective",),
    "activations on host": (*FULL, "offload.activations=all"),
    "vertical": (*FULL, "accumulation.order=vertical"),
    "updates in backward": IN_BACKWARD,
    "updates in backward at once": (*IN_BACKWARD, "training.max_grad_norm=null"),
    "streamed": (*IN_BACKWARD, "offload.optimizer=host", "offload.parameters=stream"),
    "tiles": ("tiling.mlp=2", "tiling.head=3"),
    "tiles, in the weights' type": ("tiling.mlp=2", "tiling.head=3", "accumulation.dtype=weights"),
    "model's own loss": ("loss.chunk_tokens=null",),
    "exact master": ("optimizer.master=split16",),
    "exact master, in the weights' type": ("optimizer.master=split16", "accumulation.dtype=weights"),
    "bitsandbytes": ("optimizer.name=adamw_bnb_8bit",),
    "autocast": ("training.mixed_precision=bf16",),
}


TIED = ("alone", "updates in backward", "streamed", "model's own loss")
RUNS = [*(("llama", name) for name in NEIGHBOURS), *(("gemma2", name) for name in TIED)]
QUICK = [
    *(
        ("llama", name)
        for name in ("alone", "in the weights' type", "vertical", "updates in backward at once")
    ),
    *(
        ("llama", name)
        for name in ("tiles", "tiles, in the weights' type", "exact master", "bitsandbytes", "autocast")
    ),
    *(("gemma2", name) for name in ("streamed", "model's own loss")),
]
"""The next test runs the others that recompute or offload activations."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's outcome, by the model's family and the recipe's settings."""

    @functools.cache
    def run(family, *settings):
        folder = tmp_path_factory.mktemp(family)
        AutoConfig.for_model(model_type=family, **FAMILIES[family]).save_pretrained(folder)
        always = (
            f"model={folder}",
            "model.weights=random",
            "model.dtype=bfloat16",
            "data=any",
            "data.max_length=64",
            "training.use_cpu=true",
            "training.per_device_train_batch_size=2",
            "training.gradient_accumulation_steps=3",
            "training.learning_rate=1e-2",
        )
        return outcome_of(load_recipe(None, [*always, *settings]), folder)

    return run


@pytest.mark.parametrize("family,neighbours", few_quick(RUNS, QUICK))
def test_a_run_is_the_same_but_for_the_rounding_of_shares(run, family, neighbours):
    settings = NEIGHBOURS[neighbours]
    plain, ours = run(family, *settings), run(family, *settings, "accumulation.fusion=true")
    torch.testing.assert_close(ours.losses, plain.losses, atol=0.03, rtol=0)
    assert ours.losses != plain.losses, "nothing was summed otherwise"


@pytest.mark.parametrize("neighbours", ["checkpointed", "selective", "activations on host"])
def test_what_moves_bytes_alone_changes_no_bit_of_fused_sums(run, neighbours):
    alone, other = (
        run("llama", *NEIGHBOURS[name], "accumulation.fusion=true") for name in ("alone", neighbours)
    )
    assert other.losses == alone.losses
    assert all(torch.equal(weight, alone.weights[name]) for name, weight in other.weights.items())


def test_layers_that_are_not_linear_modules_are_refused_where_the_head_is_streamed(run):
    with pytest.raises(UserError, match=r"GPT2LMHeadModel has none.*streamed"):
        run("gpt2", *NEIGHBOURS["streamed"], "accumulation.fusion=true")


def test_it_is_off_or_refused_where_it_would_do_nothing_else():
    for settings, match in (
        (("adapter.name=lora",), r"adapter\.name=lora trains float32"),
        (("distributed.strategy=fsdp2",), "works in one process"),
    ):
        with pytest.raises(UserError, match=match):
            load_recipe("tiny", ["model.dtype=bfloat16", "accumulation.fusion=true", *settings])
