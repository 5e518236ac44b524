"""Buffers of CUDA's kernels, counted by hand from the code that allocates them."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from lowmem_ft.foundation.catalog.context_overhead import process_overhead_bytes
from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.upstream.torch_version import TORCH_VERSION
from lowmem_ft.virtual_gpu.costs.workspaces import (
    _cublaslt_workspace_bytes,
    cublas_workspace_bytes,
    persistent_workspaces,
    workspace_bytes,
)
from lowmem_ft.virtual_gpu.gpu import VirtualGPU

aten = torch.ops.aten
BRAIN, HALF, FULL = torch.bfloat16, torch.float16, torch.float32
TURING, AMPERE, ADA, HOPPER, BLACKWELL = (7, 5), (8, 0), (8, 9), (9, 0), (10, 0)
MIB = 2**20


def make_gpu(capability=AMPERE):
    values = {field.name: 2**30 for field in dataclasses.fields(Gpu) if field.name != "lacks"}
    known = {"compute_capability": capability, "num_multiprocessors": 108, "prices": (), "sources": {}}
    flops = {"float32": 1e13, "float16": 1e14, "bfloat16": 1e14}
    return Gpu(**values | known | {"name": "test", "full_name": "Test", "dense_flops": flops})


def empty(*shape, dtype=BRAIN, device="meta"):
    return torch.empty(shape, dtype=dtype, device=device)


B, H, T, D = 2, 8, 200, 64


def attention(kernel, capability, *, dtype=BRAIN, kv_heads=H, size=D, tokens=T):
    """Buffers of an attention kernel's backward pass, its operands laid out as transformers does."""

    def operand(heads):
        return empty(B, tokens, heads, size, dtype=dtype).transpose(1, 2)

    query, key = operand(H), operand(kv_heads)
    rows, seed = empty(B, H, tokens, dtype=FULL), empty(dtype=torch.long)
    names = {"grad_out": operand(H), "query": query, "key": key, "value": key, "out": operand(H)}
    if kernel is aten._scaled_dot_product_efficient_attention_backward.default:
        names["grad_out_"] = names.pop("grad_out")
    kwargs = {**names, "logsumexp": rows, "philox_seed": seed, "philox_offset": seed}
    return workspace_bytes(kernel, (), kwargs, None, make_gpu(capability))


FLASH = aten._scaled_dot_product_flash_attention_backward.default
EFFICIENT = aten._scaled_dot_product_efficient_attention_backward.default
CUDNN = aten._scaled_dot_product_cudnn_attention_backward.default
ROWS = B * H * 256  # 200 tokens are two blocks of 128


def test_flash_sums_the_gradient_of_queries_in_float32():
    assert attention(FLASH, AMPERE) == (ROWS * 4, ROWS * 64 * 4)
    assert attention(FLASH, AMPERE, size=72) == (ROWS * 4, ROWS * 96 * 4)
    assert attention(FLASH, AMPERE, size=256) == (ROWS * 4, ROWS * 256 * 4)


def test_flash_spreads_shared_key_heads():
    assert attention(FLASH, AMPERE, kv_heads=2)[2:] == (B * H * T * D * 2,) * 2


def test_flash_copies_what_is_not_contiguous():
    rows = empty(B, H, T, dtype=FULL)
    operand = empty(B, H, T, D)  # transposed in the kernel's eyes
    kwargs = dict.fromkeys(("grad_out", "query", "key", "value", "out"), operand) | {"logsumexp": rows}
    assert workspace_bytes(FLASH, (), kwargs, None, make_gpu())[2:] == (B * H * T * D * 2,) * 2


def test_deterministic_flash_sums_in_separate_buffers():
    torch.use_deterministic_algorithms(True)
    try:
        splits = -(-108 // (B * H))
        assert attention(FLASH, AMPERE)[1] == splits * ROWS * 64 * 4
    finally:
        torch.use_deterministic_algorithms(False)


def test_flash_over_documents_rounds_each_up():
    query = empty(1000, H, D)
    kwargs = dict.fromkeys(("grad_out", "query", "key", "value", "out"), query)
    kwargs["cum_seq_q"] = torch.empty(4, dtype=torch.int32, device="meta")
    rows = H * (1000 + 3 * 128)
    sizes = workspace_bytes(aten._flash_attention_backward.default, (), kwargs, None, make_gpu())
    assert sizes == (rows * 4, rows * D * 4)


DELTA = B * H * T * 4


@pytest.mark.parametrize(
    "capability, dtype, size, blocks, columns, rows, accumulated",
    [
        pytest.param(AMPERE, BRAIN, 64, 4, 1, 64, 0, id="in-registers"),
        pytest.param(AMPERE, BRAIN, 128, 2, 2, 128, 0, id="a100-has-room-for-128"),
        pytest.param(ADA, BRAIN, 96, 2, 2, 128, 0, id="ada-at-96"),
        pytest.param(ADA, BRAIN, 128, 4, 2, 64, 4 * 64 * 256, id="ada-at-128-sums-keys-too"),
        pytest.param(TURING, HALF, 128, 4, 2, 64, 4 * 64 * 256, id="t4-at-128-sums-keys-too"),
    ],
)
def test_efficient_attention_sums_tiles_in_float32(
    capability, dtype, size, blocks, columns, rows, accumulated
):
    tiles = blocks * columns * (rows * 64 + 4)
    workspace = B * H * (tiles + accumulated) * 4
    assert attention(EFFICIENT, capability, dtype=dtype, size=size) == (DELTA, workspace)


def test_efficient_attention_in_float32_multiplies_output_and_gradient_first():
    wide = attention(EFFICIENT, AMPERE, dtype=FULL, size=8)
    assert wide == (DELTA, B * H * 4 * (64 * 64 + 4) * 4)
    assert attention(EFFICIENT, AMPERE, dtype=FULL, size=64)[1] >= B * H * T * 64 * 4


def test_cudnn_lays_out_one_workspace():
    rows = B * H * T
    assert attention(CUDNN, HOPPER) == (rows * 4 + rows * D * 4,)
    assert attention(CUDNN, HOPPER, kv_heads=2) == (rows * 4 + rows * D * 4 + 2 * rows * D * 2,)


# --- the rest ---------------------------------------------------------------------------------------------------------


def embedding(tokens, *, vocabulary=1000, width=16, dtype=BRAIN):
    gradient = empty(tokens, width, dtype=dtype)
    indices = empty(tokens, dtype=torch.long)
    return workspace_bytes(
        aten.embedding_dense_backward.default,
        (gradient, indices, vocabulary, -1, False),
        {},
        None,
        make_gpu(),
    )


def test_a_short_batch_needs_no_sort_for_its_embeddings():
    assert embedding(3072) == ()


def test_embeddings_of_a_long_batch_are_summed_in_parts():
    *indices, parts = embedding(5000)
    assert parts == (500 + 1000) * 16 * 4  # float32, whatever the gradient's type
    assert indices == [5000 * 8] * 3 + [1000 * 8] * 2 + [1500 * 8]


def test_norms_of_many_tensors_have_room_for_the_largest():
    tensors = [empty(65536 * 3 + 1), empty(10), empty(10)]
    assert workspace_bytes(aten._foreach_norm.Scalar, (tensors,), {}, None, make_gpu()) == (3 * 4 * 4,)


def test_copies_to_the_host_that_change_type_go_by_way_of_the_device():
    with VirtualGPU(make_gpu()) as gpu:
        on_device, on_host = empty(8, 8, dtype=FULL, device=gpu.device), empty(8, 8, device="cpu")

        def copy(target, source):
            return workspace_bytes(aten.copy_.default, (target, source), {}, target, make_gpu())

        assert copy(on_host, on_device) == (8 * 8 * 2,)
        assert copy(on_host.float(), on_device) == ()
        assert copy(on_host.float(), on_device.t()) == (8 * 8 * 4,)
        assert copy(on_device.t(), on_host.float()) == (8 * 8 * 4,)
        assert copy(on_device, on_device.bfloat16()) == ()


def test_other_operators_take_nothing():
    x = empty(8, 8)
    assert workspace_bytes(aten.mul.Tensor, (x, x), {}, x, make_gpu()) == ()


# --- libraries --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "capability, expected",
    [
        (TURING, 8_519_680),
        (AMPERE, 8_519_680),
        (ADA, 8_519_680),
        (HOPPER, 32 * MIB),
        (BLACKWELL, 32 * MIB if TORCH_VERSION >= (2, 12) else 8_519_680),
    ],
)
def test_cublas_has_the_workspace_of_the_architecture(capability, expected, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert cublas_workspace_bytes(capability) == expected


def test_workspaces_can_be_configured(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8:4096:1")
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "2048")
    assert cublas_workspace_bytes(HOPPER) == (16 * 8 + 4096) * 1024
    assert _cublaslt_workspace_bytes(HOPPER) == 2 * MIB


def test_a_bias_takes_a_second_library():
    keys = [key for key, _ in persistent_workspaces(aten.addmm.default, 3, make_gpu())]
    assert keys == [("cublas", "main", 3), ("cublaslt", "main", 3)]
    assert list(persistent_workspaces(aten.relu.default, 0, make_gpu())) == []


def test_forward_and_backward_have_a_workspace_each():
    with VirtualGPU(make_gpu()) as gpu:
        x = torch.ones(4, 4, device=gpu.device, requires_grad=True)
        F.linear(x, x).sum().backward()
        F.linear(x, x).sum().backward()
        held = [
            allocation.size_bytes
            for allocation in gpu.recorder.timeline.allocations
            if allocation.category == "workspace"
        ]
    assert held == [8_519_680, 8_519_680]


def test_workspaces_are_alive_beside_the_result_and_gone_after():
    with VirtualGPU(make_gpu()) as gpu:
        query = torch.ones(B, H, T, D, device=gpu.device, dtype=BRAIN, requires_grad=True)
        output = F.scaled_dot_product_attention(query, query, query, is_causal=True)
        gradient = torch.ones_like(output)
        gpu.recorder.reset_peak()
        before = gpu.recorder.live_bytes
        torch.autograd.grad(output, query, gradient)
        peak = gpu.recorder.peak_bytes - before
    results, copies = 3 * B * H * T * D * 2, 2 * B * H * T * D * 2
    assert peak == results + copies + ROWS * 4 + ROWS * 64 * 4


def test_outside_the_allocator():
    gpu = make_gpu()
    assert process_overhead_bytes(gpu, uses_bitsandbytes=False, num_processes=1) == {"CUDA context": 2**30}
    many = process_overhead_bytes(gpu, uses_bitsandbytes=True, num_processes=8)
    assert many["NCCL"] > process_overhead_bytes(gpu, uses_bitsandbytes=False, num_processes=2)["NCCL"] > 0
    assert set(many) == {"CUDA context", "bitsandbytes", "NCCL"}


def test_the_gradient_of_softmax_takes_the_product_of_its_operands():
    gradient, output = empty(4, 32, dtype=FULL), empty(4, 32, dtype=FULL)

    def workspace(operator, *args):
        return workspace_bytes(operator, (*args, -1, HALF), {}, None, make_gpu())

    assert workspace(aten._softmax_backward_data.default, gradient, output) == (4 * 32 * 4,)
    assert workspace(aten._log_softmax_backward_data.default, gradient, output) == ()
    assert workspace(aten._log_softmax_backward_data.default, gradient.t(), output.t()) == (4 * 32 * 4,) * 2


def test_softmax_of_rows_that_are_apart_copies_them():
    scores = empty(4, 32)
    assert workspace_bytes(aten._softmax.default, (scores, -1, False), {}, None, make_gpu()) == ()
    assert workspace_bytes(aten._softmax.default, (scores.t(), -1, False), {}, None, make_gpu()) == (
        4 * 32 * 2,
    )
