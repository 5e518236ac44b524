"""The attention kernel is the one that CUDA takes."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.upstream.attention_choice import SdpaCall, choose_sdpa
from lowmem_ft.foundation.upstream.torch_version import TORCH_VERSION

VOLTA, TURING, AMPERE, RTX_3090, ADA, HOPPER, BLACKWELL, RTX_5090 = (
    (7, 0),
    (7, 5),
    (8, 0),
    (8, 6),
    (8, 9),
    (9, 0),
    (10, 0),
    (12, 0),
)
HALF = torch.float16
BRAIN = torch.bfloat16


def qkv(dtype=BRAIN, heads=4, kv_heads=None, size=64, tokens=32, keys=None, trains=True):
    def make(num_heads, length):
        return torch.empty(2, num_heads, length, size, dtype=dtype, device="meta", requires_grad=trains)

    kv_heads = kv_heads or heads
    return make(heads, tokens), make(kv_heads, keys or tokens), make(kv_heads, keys or tokens)


def choose(capability, *, mask=None, dropout=0.0, causal=True, gqa=False, **shape):
    call = SdpaCall(*qkv(**shape), mask, dropout, causal, enable_gqa=gqa, capability=capability)
    return choose_sdpa(call)


MASK = torch.empty(1, 1, 32, 32, dtype=torch.bool, device="meta")


@pytest.mark.parametrize(
    "capability, call, backend",
    [
        pytest.param(AMPERE, {}, "flash", id="half-on-ampere"),
        pytest.param(TURING, {"dtype": HALF}, "efficient", id="before-ampere"),
        pytest.param(TURING, {"dtype": BRAIN}, "math", id="bfloat16-before-ampere"),
        pytest.param(AMPERE, {"dtype": torch.float32}, "efficient", id="float32"),
        pytest.param(AMPERE, {"dtype": torch.float64}, "math", id="float64"),
        pytest.param(AMPERE, {"mask": MASK, "causal": False}, "efficient", id="mask"),
        pytest.param(AMPERE, {"tokens": 16, "keys": 32}, "efficient", id="causal-not-square"),
        pytest.param(AMPERE, {"tokens": 16, "keys": 32, "causal": False}, "flash", id="not-square"),
        pytest.param(AMPERE, {"size": 264}, "efficient", id="head-above-256"),
        pytest.param(AMPERE, {"size": 68, "mask": MASK, "causal": False}, "math", id="head-not-aligned"),
        pytest.param(
            TURING, {"size": 65, "dtype": torch.float32}, "efficient", id="no-tensor-cores-any-head"
        ),
        pytest.param(AMPERE, {"size": 65}, "flash", id="flash-pads-any-head"),
        pytest.param(AMPERE, {"size": 224}, "flash", id="large-head-on-a100"),
        pytest.param(ADA, {"size": 224}, "efficient", id="large-head-trains-on-ada"),
        pytest.param(ADA, {"size": 224, "trains": False}, "flash", id="large-head-infers-on-ada"),
        pytest.param(ADA, {"size": 256}, "flash", id="256-trains-on-ada-without-dropout"),
        pytest.param(RTX_3090, {"size": 256, "dropout": 0.1}, "efficient", id="256-with-dropout"),
        pytest.param(RTX_5090, {"size": 208}, "efficient", id="large-head-on-5090"),
        pytest.param(RTX_5090, {}, "flash", id="5090"),
        pytest.param(AMPERE, {"gqa": True, "kv_heads": 2}, "flash", id="gqa"),
        pytest.param(AMPERE, {"kv_heads": 2}, "math", id="fewer-key-heads-unasked"),
        pytest.param(AMPERE, {"gqa": True, "heads": 4, "kv_heads": 3}, "math", id="heads-that-do-not-divide"),
        pytest.param(HOPPER, {}, "cudnn", id="hopper"),
        pytest.param(BLACKWELL, {"gqa": True, "kv_heads": 2}, "cudnn", id="gqa-on-blackwell"),
        pytest.param(HOPPER, {"mask": MASK, "causal": False}, "cudnn", id="mask-on-hopper"),
        pytest.param(HOPPER, {"dropout": 0.1}, "flash", id="cudnn-knows-sixteenths-of-dropout"),
        pytest.param(HOPPER, {"dropout": 0.125}, "cudnn", id="an-eighth-of-dropout"),
        pytest.param(HOPPER, {"size": 160}, "flash", id="cudnn-has-no-backward-of-160"),
        pytest.param(HOPPER, {"dtype": torch.float32}, "efficient", id="float32-on-hopper"),
    ],
)
def test_the_kernel_is_cudas(capability, call, backend):
    assert choose(capability, **call).backend == backend


@pytest.mark.parametrize("capability", [TURING, AMPERE])
def test_masked_groups_of_heads_are_unfused_before_torch_2_14(capability):
    choice = choose(capability, dtype=HALF, gqa=True, kv_heads=2, mask=MASK, causal=False)
    assert choice.backend == ("efficient" if TORCH_VERSION >= (2, 14) else "math")


def test_gemma_head_size_on_hopper_follows_the_version_of_torch():
    assert choose(HOPPER, size=256).backend == ("cudnn" if TORCH_VERSION >= (2, 14) else "flash")


def test_the_reason_names_what_each_better_kernel_needs():
    choice = choose(TURING, dtype=BRAIN)
    assert "flash needs compute capability 8.0 to 12.1, got 7.5" in choice.reason
    assert "memory-efficient needs float16 or float32, got bfloat16" in choice.reason
    assert choose(AMPERE).reason == ""


def test_switches_are_respected():
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert choose(AMPERE).backend == "efficient"
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
        assert choose(HOPPER).backend == "math"


def test_cudnn_can_be_put_behind_flash(monkeypatch):
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert choose(HOPPER).backend == "flash"


def test_no_kernel_left_is_said_with_each_reason():
    with (
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        pytest.raises(UserError, match=r"flash needs compute capab"),
    ):
        choose(TURING, dtype=HALF)
