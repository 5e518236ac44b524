"""Which models' attention can run in a ring, and the stand-ins with which it runs in tests."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from ring_on_gloo import fused_kernels_on_cpu
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    BloomConfig,
    FalconH1Config,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from lowmem_ft.foundation.errors import ModelError, UserError
from lowmem_ft.techniques.attention.choose_attention import choose_attention
from lowmem_ft.techniques.attention.ring_attention import (
    RING_ATTENTION,
    block_tokens,
    register_ring_attention,
)

CPU = torch.device("cpu")


def choose(config):
    return choose_attention(
        "auto", config=config, device=CPU, compute_dtype=torch.float32, context=2
    ).implementation


@pytest.mark.parametrize(
    "config,named",
    [
        (MistralConfig(sliding_window=4096), "sliding windows (sliding_window=4096)"),
        (Gemma2Config(), "soft caps (attn_logit_softcapping=50.0)"),
        (GptOssConfig(), "attention sinks"),
        (BloomConfig(), "attention of its own"),
        (Qwen3NextConfig(), "layers of other kinds (linear_attention)"),
        (MambaConfig(), "recurrent layers"),
        (FalconH1Config(), "recurrent layers"),
        (MixtralConfig(output_router_logits=True), "a loss of its routers over whole rows"),
        (LlamaConfig(attention_dropout=0.1), "dropout of scores (attention_dropout=0.1)"),
        (
            LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            "positions that depend on the length of the row (rope_type=dynamic)",
        ),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_what_a_ring_does_not_have_is_refused_by_its_name(config, named):
    with fused_kernels_on_cpu(), pytest.raises(ModelError) as error:
        choose(config)
    assert named in str(error.value)
    assert "distributed.context=1" in str(error.value)


@pytest.mark.parametrize("config", [LlamaConfig(), Qwen3Config(), MixtralConfig()])
def test_plain_causal_attention_runs_in_a_ring_on_a_gpu(config):
    with fused_kernels_on_cpu():
        assert choose(config) == RING_ATTENTION
    with pytest.raises(UserError, match="needs GPUs"):
        choose(config)


def test_a_part_of_a_row_is_of_whole_blocks_for_the_kernel_that_has_some():
    assert block_tokens(LlamaConfig(), torch.float32, CPU) == 32
    assert block_tokens(LlamaConfig(), torch.bfloat16, CPU) == 1
    assert block_tokens(LlamaConfig(head_dim=512), torch.bfloat16, CPU) == 32


@pytest.mark.parametrize(
    "given", [{"softcap": 30.0}, {"sliding_window": 8}, {"dropout": 0.1}, {"is_causal": False}]
)
def test_a_call_that_asks_for_more_is_refused(given):
    from transformers import AttentionInterface

    register_ring_attention()
    forward = AttentionInterface()[RING_ATTENTION]
    query = torch.randn(1, 2, 4, 8)
    with pytest.raises(UserError, match="needs plain causal attention"):
        forward(torch.nn.Identity(), query, query, query, None, **given)


@pytest.mark.parametrize("dtype,key_heads", [(torch.float32, 4), (torch.bfloat16, 2)])
def test_stand_ins_compute_what_torch_computes(dtype, key_heads):
    """A length that is no multiple of a block; the flash kernel takes grouped heads."""
    operands = [torch.randn(2, heads, 40, 16, dtype=dtype) for heads in (4, key_heads, key_heads)]
    grad = torch.randn(2, 4, 40, 16, dtype=dtype)

    def attend():
        query, key, value = own = [operand.clone().requires_grad_() for operand in operands]
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=key_heads < 4)
        return out, *torch.autograd.grad(out, own, grad)

    expected = attend()
    with (
        fused_kernels_on_cpu() as calls,
        sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]),
    ):
        found = attend()
    assert sum(calls.values()) == 2
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for ours, torchs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=tolerance, atol=tolerance)


def test_stand_ins_refuse_grouped_heads_where_a_gpu_does():
    query, key = torch.randn(1, 4, 8, 16), torch.randn(1, 2, 8, 16)
    with (
        fused_kernels_on_cpu(),
        sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION),
        pytest.raises(UserError, match="as many key heads as query heads"),
    ):
        F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)
