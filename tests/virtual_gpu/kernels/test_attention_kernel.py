"""Attention on the virtual GPU keeps what CUDA's kernels keep."""

import math

import pytest
import torch
import torch.nn.functional as F

from lowmem_ft.virtual_gpu.gpu import VirtualGPU

TURING, AMPERE, HOPPER = "t4", "a100-80gb", "h100-80gb"
HALF = torch.float16
BRAIN = torch.bfloat16
B, H, T, D = 2, 4, 100, 64
OPERAND = B * H * T * D * 2


def qkv(device, dtype=BRAIN, size=D):
    return [torch.empty(B, H, T, size, dtype=dtype, device=device, requires_grad=True) for _ in range(3)]


def kept_bytes(gpu, call, **shape):
    """Bytes of the distinct storages that autograd keeps, and the virtual GPU's choices."""
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage._cdata] = (storage, storage.nbytes())
        return tensor

    with VirtualGPU(gpu) as gpu:
        operands = qkv(gpu.device, **shape)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = call(*operands)
        assert output.shape == operands[0].shape
        output.sum().backward()
        assert [operand.grad.shape for operand in operands] == [operand.shape for operand in operands]
        return sum(size for _, size in kept.values()), gpu.choices


def causal(query, key, value):
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def masked(query, key, value):
    mask = torch.ones(B, 1, T, T, dtype=torch.bool, device=query.device)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def test_flash_keeps_a_number_a_row():
    kept, choices = kept_bytes(AMPERE, causal)
    seeds = 2 * 8 + 8
    assert kept == 4 * OPERAND + B * H * T * 4 + seeds
    assert choices == ["attention: flash kernel"]


def test_flash_keeps_padded_copies_of_odd_heads():
    kept, _ = kept_bytes(AMPERE, causal, size=60)
    assert kept == 4 * OPERAND + B * H * T * 4 + 3 * 8  # of 64, not 60


def test_efficient_pads_its_row_sums_to_32():
    kept, choices = kept_bytes(TURING, causal, dtype=HALF)
    assert kept == 4 * OPERAND + B * H * 128 * 4 + 2 * 8
    assert "memory-efficient" in choices[0]


def test_efficient_keeps_the_mask_in_the_type_of_the_queries_with_aligned_rows():
    kept, _ = kept_bytes(AMPERE, masked)
    mask = B * T * 104 * 2
    assert kept == 4 * OPERAND + B * H * 128 * 4 + 2 * 8 + mask


def test_cudnn_keeps_a_number_a_row():
    kept, _ = kept_bytes(HOPPER, causal)
    assert kept == 4 * OPERAND + B * H * T * 4 + 2 * 8


def test_unfused_attention_keeps_scores_in_float32():
    kept, choices = kept_bytes(TURING, causal, dtype=BRAIN)
    scores = B * H * T * T * 4
    assert kept >= scores + 4 * OPERAND
    assert "tokens x tokens" in choices[0]


def test_recomputation_takes_the_same_kernel():
    from torch.utils.checkpoint import checkpoint

    with VirtualGPU(AMPERE) as gpu:
        operands = qkv(gpu.device)
        checkpoint(causal, *operands, use_reentrant=False).sum().backward()
        assert gpu.choices == ["attention: flash kernel"]
        assert operands[0].grad.shape == operands[0].shape


def test_nothing_is_kept_in_evaluation():
    with VirtualGPU(TURING) as gpu, torch.no_grad():
        before = gpu.recorder.live_bytes
        operands = qkv(gpu.device, dtype=HALF)
        output = causal(*operands)
        made = sum(tensor.nbytes for tensor in (*operands, output))
        assert gpu.recorder.live_bytes - before == made


def test_scale_comes_from_the_head_size_before_padding(monkeypatch):
    scales = []
    original = torch.ops.aten._scaled_dot_product_flash_attention

    def spy(*args, scale):
        scales.append(scale)
        return original(*args, scale=scale)

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention", spy)
    kept_bytes(AMPERE, causal, size=60)
    assert scales == [pytest.approx(1 / math.sqrt(60))]
