"""Types a device cannot train with are refused; lost updates are counted, exactly and once."""

import logging
from collections import OrderedDict

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from bitsandbytes.optim import AdamW as BitsandbytesAdamW
from torch import nn
from torch.utils.hooks import RemovableHandle

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.techniques import precision, precision_check
from lowmem_ft.techniques.precision import enable_lost_update_meter
from lowmem_ft.techniques.precision_check import check_precision
from lowmem_ft.virtual_gpu import VirtualGPU

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def turing(cuda_driver):
    """A CUDA device that only emulates bfloat16."""
    cuda_driver(name="Tesla T4", major=7, minor=5)


@pytest.mark.parametrize(
    "dtype,mixed_precision",
    [("float32", "no"), ("float32", "bf16"), ("bfloat16", "no"), ("bfloat16", "bf16")],
)
def test_the_cpu_trains_in_float32_and_bfloat16(dtype, mixed_precision):
    check_precision(dtype, mixed_precision, CPU)


@pytest.mark.parametrize(
    "dtype,mixed_precision,setting",
    [
        ("bfloat16", "no", "model.dtype=bfloat16 on Tesla T4"),
        ("float32", "bf16", "training.mixed_precision=bf16 on Tesla T4"),
        ("bfloat16", "bf16", "model.dtype=bfloat16 and training.mixed_precision=bf16 on Tesla T4"),
    ],
)
def test_bfloat16_is_refused_where_it_is_emulated(turing, dtype, mixed_precision, setting):
    with pytest.raises(UserError, match=setting) as caught:
        check_precision(dtype, mixed_precision, CUDA)
    assert "training.mixed_precision=fp16" in str(caught.value)


@pytest.mark.parametrize(
    "beside,way_out",
    [
        ({}, {"model.dtype": "float32", "training.mixed_precision": "fp16"}),
        ({"frozen": True}, {"model.dtype": "float16", "training.mixed_precision": "fp16"}),
        ({"scales_loss": False}, {"model.dtype": "float32", "training.mixed_precision": "no"}),
        (
            {"frozen": True, "scales_loss": False},
            {"model.dtype": "float16", "training.mixed_precision": "fp16"},
        ),
    ],
)
def test_the_way_out_it_names_works(turing, beside, way_out):
    with pytest.raises(UserError) as caught:
        check_precision("bfloat16", "no", CUDA, **beside)
    for key, value in way_out.items():
        assert f"{key}={value}" in str(caught.value)
    check_precision(way_out["model.dtype"], way_out["training.mixed_precision"], CUDA, **beside)
    check_precision("float32", "no", CUDA)


def test_float16_weights_are_refused_with_every_broken_rule_at_once():
    with pytest.raises(UserError) as caught:
        check_precision("float16", "fp16", CPU)
    problems = caught.value.problems
    assert len(problems) == 3
    assert "got model.dtype=float16" in problems[0]
    assert "fp16 needs float32 weights" in problems[1]
    assert "got device cpu" in problems[2]


def test_autocast_over_bfloat16_weights_is_allowed_and_remarked_on(caplog):
    with caplog.at_level(logging.INFO, precision_check.__name__):
        check_precision("bfloat16", "bf16", CPU)
    assert [record.levelname for record in caplog.records] == ["INFO"]


def weights(shape=(300, 40), dtype=torch.bfloat16):
    """Weights as a trained model's: about 0.02."""
    return nn.Parameter((torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype))


def step(optimizer, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)
    optimizer.step()


OPTIMIZERS = [torch.optim.AdamW, BitsandbytesAdamW]


@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_a_tiny_learning_rate_loses_nearly_all_in_bfloat16_and_warns_once(optimizer_class, caplog):
    optimizer = optimizer_class([weights()], lr=1e-6, weight_decay=0.0)
    meter = enable_lost_update_meter(optimizer)
    assert meter.fraction == 0
    for seed in range(3):
        step(optimizer, seed)
        assert 0.95 < meter.fraction < 1
    assert 0.95 < meter.total_fraction < 1
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "optimizer.master=split24" in warnings[0]
    assert "1e-06" in warnings[0]


@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_a_large_learning_rate_loses_little_and_says_nothing(optimizer_class, caplog):
    optimizer = optimizer_class([weights()], lr=1e-2, weight_decay=0.0)
    meter = enable_lost_update_meter(optimizer)
    step(optimizer)
    assert meter.fraction < 0.05
    assert not caplog.records


def test_float32_weights_lose_nothing():
    optimizer = torch.optim.AdamW([weights(dtype=torch.float32)], lr=1e-6)
    meter = enable_lost_update_meter(optimizer)
    step(optimizer)
    assert meter.fraction == 0


def test_it_equals_a_count_over_every_element_of_a_small_tensor():
    parameter = weights((64, 64))  # 4096: every element is sampled
    optimizer = torch.optim.AdamW([parameter], lr=1e-4, weight_decay=0.0)
    meter = enable_lost_update_meter(optimizer)
    lost = updates = 0
    for seed in range(4):
        before = parameter.detach().clone()
        parameter.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
        parameter.grad[:20] = 0  # momentum moves some of these; they are no updates of this gradient
        optimizer.step()
        counted = parameter.grad != 0
        step_lost = int(((parameter.detach() == before) & counted).sum())
        assert meter.fraction == step_lost / int(counted.sum())
        lost, updates = lost + step_lost, updates + int(counted.sum())
    assert 0 < meter.total_fraction < 1
    assert meter.total_fraction == lost / updates


def test_the_sample_speaks_for_the_whole_and_stays_bounded(monkeypatch):
    large, small = (
        weights((1000, 500)),
        nn.Parameter(torch.ones(4096, dtype=torch.bfloat16)),
    )  # small loses all
    optimizer = torch.optim.AdamW([large, small], lr=1e-4, weight_decay=0.0)
    meter = enable_lost_update_meter(optimizer)
    sizes = []
    take = precision._Sample.take

    def take_and_note(*args, **kwargs):
        sample = take(*args, **kwargs)
        sizes.append(sample.bits.numel())
        return sample

    monkeypatch.setattr(precision._Sample, "take", take_and_note)
    before = [parameter.detach().clone() for parameter in (large, small)]
    step(optimizer)
    lost = sum(int((old == new).sum()) for old, new in zip(before, (large, small), strict=True))
    assert sizes == [4066, 4096]  # every 123rd of 500,000, and all of 4096
    # Four standard errors of 4066 elements; counting both parameters alike would be off by 0.3.
    assert meter.fraction == pytest.approx(lost / 504_096, abs=0.03)


def test_the_sample_visits_every_column():
    """4096 * 24 rows of 32: taking every 768th element would see column 0 alone, the only one that moves here."""
    columns = torch.full((4096 * 24, 32), 1.0, dtype=torch.bfloat16)
    columns[:, 0] = 1e-3
    optimizer = torch.optim.AdamW([nn.Parameter(columns)], lr=1e-4, weight_decay=0.0)
    meter = enable_lost_update_meter(optimizer)
    step(optimizer)
    assert meter.fraction == pytest.approx(31 / 32, abs=0.01)


def test_parameters_without_gradient_and_groups_at_rate_zero_are_not_measured():
    moving, warming, idle = weights(), weights(), weights()
    groups = [{"params": [moving]}, {"params": [warming], "lr": 0.0}, {"params": [idle]}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0)
    meter = enable_lost_update_meter(optimizer)
    moving.grad, warming.grad = torch.ones_like(moving), torch.ones_like(warming)
    optimizer.step()
    assert meter.fraction < 0.05


def test_a_warm_up_is_measured_but_gives_no_false_alarm(caplog):
    optimizer = torch.optim.AdamW([weights()], lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, n * 1e-4))
    meter = enable_lost_update_meter(optimizer)
    for _ in range(2):
        step(optimizer)
        schedule.step()
    assert meter.fraction > 0.9
    assert not caplog.records


@pytest.fixture
def accelerator():
    """Its settings are shared by the process, so they are forgotten before and after."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(cpu=True, mixed_precision="no")
    AcceleratorState._reset_state(reset_partial_state=True)


def test_it_sees_steps_that_go_through_accelerate(accelerator):
    optimizer = torch.optim.AdamW([weights()], lr=1e-6)
    wrapped = accelerator.prepare_optimizer(optimizer)
    meter = enable_lost_update_meter(optimizer)
    step(wrapped)
    assert meter.fraction > 0.95


class Announcing:
    """An optimizer that says which part of a weight it updates when, in backward for one."""

    def __init__(self, *parameters):
        self.param_groups = [{"params": parameters}]
        self.hooks = OrderedDict()

    def register_update_hook(self, hook):
        handle = RemovableHandle(self.hooks)
        self.hooks[handle.id] = hook
        return handle

    def update(self, parameter, start, stop, change, lr=1e-3):
        part, gradient = parameter.detach().view(-1)[start:stop], torch.ones(stop - start)
        afters = [hook(parameter, start, part, gradient, {"lr": lr}) for hook in self.hooks.values()]
        part.add_(change)
        for after in afters:
            if after is not None:
                after()


def test_updates_slice_by_slice_are_counted_as_one_step():
    first, second = (nn.Parameter(torch.ones(64, dtype=torch.bfloat16)) for _ in "ab")
    optimizer = Announcing(first, second)
    meter = enable_lost_update_meter(optimizer)
    for _ in range(2):  # a new step begins when a part comes again
        optimizer.update(first, 0, 32, 1.0)
        optimizer.update(first, 32, 64, 1e-6)
        optimizer.update(second, 0, 64, 1e-6)
        assert meter.fraction == 96 / 128
    optimizer.update(first, 0, 32, 1e-6)
    assert meter.fraction == 1
    optimizer.update(first, 32, 64, 1.0, lr=0.0)
    assert meter.fraction == 1
    meter.remove()
    assert not optimizer.hooks


def test_remove_stops_measuring_and_keeps_the_result():
    optimizer = torch.optim.AdamW([weights()], lr=1e-6)
    with enable_lost_update_meter(optimizer) as meter:
        step(optimizer)
    measured = meter.total_fraction
    optimizer.param_groups[0]["lr"] = 1e-2
    step(optimizer)
    assert meter.total_fraction == measured > 0.95
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_measuring_changes_no_weight():
    plain, measured = weights(), weights()
    optimizers = [torch.optim.AdamW([parameter], lr=1e-3) for parameter in (plain, measured)]
    enable_lost_update_meter(optimizers[1])
    for seed in range(3):
        for optimizer in optimizers:
            step(optimizer, seed)
    assert torch.equal(plain, measured)


def test_a_virtual_gpu_is_asked_as_a_real_one():
    with VirtualGPU("t4") as gpu:
        with pytest.raises(UserError, match=r"bfloat16 needs a GPU that computes with it .* on Tesla T4"):
            check_precision("bfloat16", "no", gpu.device)
        check_precision("float32", "fp16", gpu.device)
