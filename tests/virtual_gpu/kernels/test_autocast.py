"""Autocast on the virtual GPU casts what CUDA's casts, and keeps the casts that CUDA's keeps."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.kernels import autocast

BRAIN, FULL = torch.bfloat16, torch.float32


def make_gpu():
    values = {field.name: 2**30 for field in dataclasses.fields(Gpu) if field.name != "lacks"}
    strings = {"name": "test", "full_name": "Test"}
    return Gpu(
        **values
        | strings
        | {
            "compute_capability": (8, 0),
            "dense_flops": {"float32": 1e13, "bfloat16": 1e14},
            "prices": (),
            "sources": {},
        }
    )


@pytest.fixture
def gpu():
    with VirtualGPU(make_gpu()) as gpu:
        yield gpu


def upstream_list(macro):
    """The operators of one of torch's own lists, as its header has them."""
    header = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
    lines = re.search(rf"#define {macro}\(_\)((?:.*\\\n)*.*\n)", header.read_text())
    assert lines
    entries = re.findall(r"_\((\w+)(?:, (\w+))?\)", lines[1])
    return {f"{name}.{overload}" if overload else name for name, overload in entries}


@pytest.mark.parametrize(
    "macro, rule",
    [
        ("AT_FORALL_LOWER_PRECISION_FP", autocast._in_lower_precision),
        ("AT_FORALL_FP32_SET_OPT_DTYPE", autocast._with_float32_result),
        ("AT_FORALL_PROMOTE", autocast._in_widest_type),
    ],
)
def test_the_lists_are_those_of_the_installed_torch(macro, rule):
    ours = set(autocast._RULES[rule].split())
    theirs = upstream_list(macro)
    assert len(theirs) > 5
    assert theirs <= ours
    registered = set(autocast._cuda_autocast_operators())
    cudas_own = {"cudnn_convolution", "cudnn_convolution_transpose", "_cudnn_rnn"}
    assert (ours & registered) - theirs <= cudas_own


def test_all_that_is_in_no_other_list_is_upstreams_float32_list():
    others = {name for names in autocast._RULES.values() for name in names.split()}
    rest = set(autocast._cuda_autocast_operators()) - others
    assert len(rest) > 40
    assert upstream_list("AT_FORALL_FP32") <= rest
    assert rest - upstream_list("AT_FORALL_FP32") <= {"linalg_matrix_sqrth"}  # torch 2.14, not in the header


def test_every_rule_of_cuda_is_registered():
    autocast.register_autocast()
    for name in autocast._cuda_autocast_operators():
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastPrivateUse1"), name


# --- what comes out ---------------------------------------------------------------------------------------------------


OPERATORS = {
    "linear": (lambda x, w: F.linear(x, w), BRAIN),
    "addmm": (lambda x, w: torch.addmm(x, x, w), BRAIN),
    "softmax": (lambda x, w: x.bfloat16().softmax(-1), FULL),
    "softmax-asked": (lambda x, w: x.softmax(-1, dtype=BRAIN), BRAIN),
    "layer_norm": (lambda x, w: F.layer_norm(x.bfloat16(), (8,)), FULL),
    "sum-dim": (lambda x, w: x.bfloat16().sum(0), FULL),
    "sum-asked": (lambda x, w: x.sum(0, dtype=BRAIN), BRAIN),
    "norm-dim": (lambda x, w: torch.ops.aten.norm.ScalarOpt_dim(x.bfloat16(), 2, [0]), FULL),
    "norm-scalar": (lambda x, w: torch.ops.aten.norm.Scalar(x.bfloat16()), FULL),
    "rsqrt": (lambda x, w: x.bfloat16().rsqrt(), FULL),
    "cross_entropy": (lambda x, w: F.cross_entropy(x.bfloat16(), w.argmax(-1)), FULL),
    "addcmul-mixed": (lambda x, w: torch.addcmul(x.bfloat16(), x, w), FULL),
    "addcmul-lower": (lambda x, w: torch.addcmul(x.bfloat16(), x.bfloat16(), w.bfloat16()), BRAIN),
    "add-has-no-rule": (lambda x, w: x.bfloat16() + w.bfloat16(), BRAIN),
    "double-is-left-alone": (lambda x, w: x.double() @ w.double(), torch.float64),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_the_type_that_comes_out(gpu, name):
    operator, expected = OPERATORS[name]
    x, w = (torch.ones(8, 8, device=gpu.device) for _ in range(2))
    with torch.autocast("vgpu", dtype=BRAIN):
        assert operator(x, w).dtype == expected


def test_rms_norm_follows_the_version_of_torch(gpu):
    has_rule = "rms_norm" in set(autocast._cuda_autocast_operators())
    x = torch.ones(8, 8, device=gpu.device, dtype=BRAIN)
    with torch.autocast("vgpu", dtype=BRAIN):
        assert F.rms_norm(x, (8,)).dtype == (FULL if has_rule else BRAIN)


def test_attention_computes_in_lower_precision_and_so_fused(gpu):
    query = torch.ones(1, 2, 16, 64, device=gpu.device, requires_grad=True)
    with torch.autocast("vgpu", dtype=BRAIN):
        assert F.scaled_dot_product_attention(query, query, query, is_causal=True).dtype == BRAIN
    assert gpu.choices == ["attention: flash kernel"]


def test_binary_cross_entropy_is_refused(gpu):
    x = torch.ones(8, device=gpu.device)
    with torch.autocast("vgpu", dtype=BRAIN), pytest.raises(RuntimeError, match="not safe under autocast"):
        F.binary_cross_entropy(x, x)


def test_gradients_have_the_type_of_the_weights(gpu):
    x, weight = torch.ones(4, 8, device=gpu.device), torch.ones(8, 8, device=gpu.device, requires_grad=True)
    with torch.autocast("vgpu", dtype=BRAIN):
        loss = F.linear(x, weight).float().sum()
    loss.backward()
    assert weight.grad.dtype == FULL


# --- the cache: live bytes of the virtual GPU against what torch's autocast does on the CPU ---------------------------


SIDE = 64
CAST = SIDE * SIDE * 2


def live_in_and_after(device, live_bytes, *, no_grad=False, cache=True, view=False, trains=True):
    """Bytes that two products with one weight leave alive in an autocast block and after it, results aside."""
    weight = torch.ones(SIDE * SIDE, device=device).view(SIDE, SIDE)  # a leaf that is a view
    weight = (weight if view else weight.clone()).requires_grad_(trains)
    x = torch.ones(1, SIDE, device=device)
    before = live_bytes()
    with torch.set_grad_enabled(not no_grad), torch.autocast(x.device.type, dtype=BRAIN, cache_enabled=cache):
        for _ in range(2):
            F.linear(x, weight)
        inside = live_bytes() - before
    return inside, live_bytes() - before


@pytest.mark.parametrize(
    "case, kept",
    [
        ({}, CAST),
        ({"cache": False}, 0),
        ({"trains": False}, 0),
        ({"view": True}, 0),
        ({"no_grad": True}, None),
    ],
    ids=str,
)
def test_casts_of_weights_are_kept_as_torchs_own_autocast_keeps_them(case, kept):
    with StorageTracker() as tracker:
        theirs = live_in_and_after("cpu", lambda: tracker.live_bytes, **case)
    with VirtualGPU(make_gpu()) as gpu:
        with_its_workspace(gpu)
        ours = live_in_and_after(gpu.device, lambda: gpu.recorder.live_bytes, **case)
    assert ours == theirs
    assert kept is None or ours == (kept, 0)


def with_its_workspace(gpu):
    """Let cuBLAS take its workspace now, so that it is not counted later."""
    torch.ones(1, 1, device=gpu.device) @ torch.ones(1, 1, device=gpu.device)


def test_a_cast_is_used_again(gpu):
    weight = torch.ones(SIDE, SIDE, device=gpu.device, requires_grad=True)
    x = torch.ones(1, SIDE, device=gpu.device)
    casts = []
    keeping = torch.autograd.graph.saved_tensors_hooks(casts.append, lambda tensor: tensor)
    with torch.autocast("vgpu", dtype=BRAIN), keeping:
        x = x.requires_grad_()
        F.linear(x, weight)
        F.linear(x, weight)
    of_weight = {tensor.untyped_storage()._cdata for tensor in casts if tensor.numel() == SIDE * SIDE}
    assert len(of_weight) == 1


def test_clearing_the_cache_frees_it(gpu):
    weight = torch.ones(SIDE, SIDE, device=gpu.device, requires_grad=True)
    x = torch.ones(1, SIDE, device=gpu.device)
    with torch.autocast("vgpu", dtype=BRAIN):
        F.linear(x, weight)
        before = gpu.recorder.live_bytes
        torch.clear_autocast_cache()
        assert before - gpu.recorder.live_bytes == CAST


def test_an_inner_block_keeps_the_cache_of_the_outer_one(gpu):
    with_its_workspace(gpu)
    weight = torch.ones(SIDE, SIDE, device=gpu.device, requires_grad=True)
    x = torch.ones(1, SIDE, device=gpu.device)
    before = gpu.recorder.live_bytes
    with torch.autocast("vgpu", dtype=BRAIN):
        with torch.autocast("vgpu", dtype=BRAIN):
            F.linear(x, weight)
        assert gpu.recorder.live_bytes - before == CAST
    assert gpu.recorder.live_bytes == before


def test_a_block_that_switches_autocast_off_leaves_types_alone(gpu):
    x = torch.ones(8, 8, device=gpu.device)
    with torch.autocast("vgpu", dtype=BRAIN), torch.autocast("vgpu", enabled=False):
        assert (x @ x).dtype == FULL
