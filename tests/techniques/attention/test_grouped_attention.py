"""Grouped heads are repeated where no fused kernel takes them: the same attention without scores of tokens x tokens."""

import pytest
import torch
import transformers as hf

from lowmem_ft.foundation.upstream import attention_choice
from lowmem_ft.techniques.attention import grouped_attention
from lowmem_ft.techniques.attention.choose_attention import choose_attention
from lowmem_ft.techniques.attention.grouped_attention import REPEATED_HEADS, register_repeated_heads
from lowmem_ft.techniques.attention.varlen_attention import register_varlen_attention
from lowmem_ft.virtual_gpu import VirtualGPU
from tests.tiny_models import FAMILY_SIZES, model_of

GROUPED = hf.LlamaConfig(**FAMILY_SIZES)
TURING, ADA = (7, 5), (8, 9)


@pytest.fixture(autouse=True)
def torch_without_grouped_heads_in_the_memory_efficient_kernel(monkeypatch):
    monkeypatch.setattr(attention_choice, "TORCH_VERSION", (2, 13))
    grouped_attention._needs_repeated_heads.cache_clear()
    yield
    grouped_attention._needs_repeated_heads.cache_clear()


def chosen(config, dtype, capability, requested="sdpa"):
    return choose_attention(
        requested,
        config=config,
        device=torch.device("cuda"),
        compute_dtype=dtype,
        compute_capability=capability,
        makes_batches=False,
    )


@pytest.mark.parametrize(
    "config, dtype, capability, implementation",
    [
        (GROUPED, torch.float16, TURING, REPEATED_HEADS),
        (GROUPED, torch.float32, ADA, REPEATED_HEADS),
        (GROUPED, torch.float16, ADA, "sdpa"),  # the flash kernel takes groups
        (hf.LlamaConfig(), torch.float16, TURING, "sdpa"),  # as many key heads
        (
            hf.LlamaConfig(head_dim=70, num_key_value_heads=8),
            torch.float16,
            TURING,
            "sdpa",
        ),  # no fused kernel
    ],
)
def test_heads_are_repeated_only_where_that_brings_a_fused_kernel(config, dtype, capability, implementation):
    assert chosen(config, dtype, capability).implementation == implementation


def test_the_choice_is_explained():
    assert "no fused kernel takes grouped ones" in chosen(GROUPED, torch.float16, TURING).reason
    assert chosen(GROUPED, torch.float16, TURING, "auto").implementation == REPEATED_HEADS


def test_a_newer_memory_efficient_kernel_takes_the_groups(monkeypatch):
    monkeypatch.setattr(attention_choice, "TORCH_VERSION", (2, 14))
    assert chosen(GROUPED, torch.float16, TURING).implementation == "sdpa"


@pytest.mark.parametrize(
    "mask_BT", [None, torch.tensor([[1] * 12, [0] * 4 + [1] * 8])], ids=["causal", "padded"]
)
@pytest.mark.parametrize("family", [hf.LlamaConfig, hf.Qwen3Config, hf.Gemma3TextConfig, hf.Qwen3MoeConfig])
def test_outputs_and_gradients_are_those_of_sdpa(family, mask_BT):
    register_repeated_heads()
    ids_BT = torch.randint(3, 120, (2, 12), generator=torch.Generator().manual_seed(0))
    results = []
    for implementation in ("sdpa", REPEATED_HEADS):
        model = model_of(family(**FAMILY_SIZES), attn_implementation=implementation)
        logits = model(ids_BT, attention_mask=mask_BT).logits[:, -8:]
        logits.square().mean().backward()
        results.append([logits, *(parameter.grad for parameter in model.parameters())])
    for value, other in zip(*results, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)


def peak_bytes(implementation):
    device = torch.device("cuda")
    with VirtualGPU("t4"):
        if implementation != "sdpa":
            batches = {"makes_batches": implementation == "ours"}
            implementation = choose_attention(
                "auto", config=GROUPED, device=device, compute_dtype=torch.float16, **batches
            ).implementation
        model = model_of(GROUPED, attn_implementation=implementation).to(device, torch.float16)
        ids_BT = torch.zeros(1, 2048, dtype=torch.long, device=device)
        model(ids_BT, use_cache=False).logits.sum().backward()
        return torch.cuda.max_memory_allocated()


def test_a_t4_keeps_no_scores():
    scores = 4 * 2048 * 2048 * 2  # bytes of a layer, in float16
    assert peak_bytes("sdpa") > 2 * scores  # of two layers
    assert peak_bytes("ours") < scores
    assert peak_bytes("a trainer's") < scores


class RemoteConfig(hf.LlamaConfig):
    """A config that transformers' own mapping does not know."""


def test_a_model_that_may_ask_for_sdpa_by_name_keeps_it():
    """Remote code finds no class for another name, and MiniMax-M3 would leave its block mask out."""
    remote = RemoteConfig(**FAMILY_SIZES)
    assert chosen(remote, torch.float16, TURING).implementation == "sdpa"
    sparse = hf.AutoConfig.for_model("minimax_m3_vl_text", **FAMILY_SIZES)
    assert chosen(sparse, torch.float16, TURING).implementation == "sdpa"


def test_autocast_decides_by_the_type_that_attention_computes_in(monkeypatch):
    """Qwen3's norms make float32 queries, which sdpa casts: the flash kernel takes the groups."""
    asked = []
    register_varlen_attention()
    with monkeypatch.context() as patched, VirtualGPU("a100-80gb"):
        patched.setattr(
            grouped_attention, "_needs_repeated_heads", lambda *facts: asked.append(facts[3]) or False
        )
        model = model_of(hf.Qwen3Config(**FAMILY_SIZES), attn_implementation="varlen_attn").to("cuda")
        with torch.autocast("cuda", torch.bfloat16):
            model(torch.zeros(1, 8, dtype=torch.long, device="cuda"))
    assert set(asked) == {torch.bfloat16}
