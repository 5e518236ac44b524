"""The attention kernel is the one CUDA takes, and keeps what CUDA's keeps."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowmem_ft.catalog.gpu import Gpu
from lowmem_ft.errors import UserError
from lowmem_ft.optimizers import OptimizerConfig, check_optimizer
from lowmem_ft.techniques.attention import choose_attention
from lowmem_ft.techniques.precision import check_precision
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.kernels.attention import choose_sdpa
from lowmem_ft.virtual_gpu.kernels.torch_version import TORCH_VERSION

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


def make_gpu(capability=AMPERE):
    numbers = {"num_multiprocessors": 108, "pcie_generation": 4, "pcie_lanes": 16, "bandwidth": 1e12}
    sizes = {field.name: 2**30 for field in dataclasses.fields(Gpu) if field.name.endswith("_bytes")}
    return Gpu(
        name="test",
        full_name="Test",
        compute_capability=capability,
        dense_flops={"float32": 1e13, "float16": 1e14, "bfloat16": 1e14},
        sources={},
        **numbers,
        **sizes,
    )


def qkv(dtype=BRAIN, heads=4, kv_heads=None, size=64, tokens=32, keys=None, device="meta", trains=True):
    def make(num_heads, length):
        return torch.empty(2, num_heads, length, size, dtype=dtype, device=device, requires_grad=trains)

    kv_heads = kv_heads or heads
    return make(heads, tokens), make(kv_heads, keys or tokens), make(kv_heads, keys or tokens)


def choose(capability, *, mask=None, dropout=0.0, causal=True, gqa=False, **shape):
    return choose_sdpa(*qkv(**shape), mask, dropout, causal, enable_gqa=gqa, compute_capability=capability)


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


# --- what is kept -----------------------------------------------------------------------------------------------------


def kept_bytes(capability, call, **shape):
    """Bytes of the distinct storages that autograd keeps, and the virtual GPU's choices."""
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage._cdata] = (storage, storage.nbytes())
        return tensor

    with VirtualGPU(make_gpu(capability)) as gpu:
        operands = qkv(device=gpu.device, **shape)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = call(*operands)
        assert output.shape == operands[0].shape
        output.sum().backward()
        assert [operand.grad.shape for operand in operands] == [operand.shape for operand in operands]
        return sum(size for _, size in kept.values()), gpu.choices


B, H, T, D = 2, 4, 100, 64
OPERAND = B * H * T * D * 2


def causal(query, key, value):
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def masked(query, key, value):
    mask = torch.ones(B, 1, T, T, dtype=torch.bool, device=query.device)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def test_flash_keeps_a_number_a_row():
    kept, choices = kept_bytes(AMPERE, causal, tokens=T)
    seeds = 2 * 8 + 8
    assert kept == 4 * OPERAND + B * H * T * 4 + seeds
    assert choices == ["attention: flash kernel"]


def test_flash_keeps_padded_copies_of_odd_heads():
    kept, _ = kept_bytes(AMPERE, causal, tokens=T, size=60)
    assert kept == 4 * OPERAND + B * H * T * 4 + 3 * 8  # of 64, not 60


def test_efficient_pads_its_row_sums_to_32():
    kept, choices = kept_bytes(TURING, causal, tokens=T, dtype=HALF)
    assert kept == 4 * OPERAND + B * H * 128 * 4 + 2 * 8
    assert "memory-efficient" in choices[0]


def test_efficient_keeps_the_mask_in_the_type_of_the_queries_with_aligned_rows():
    kept, _ = kept_bytes(AMPERE, masked, tokens=T)
    mask = B * T * 104 * 2
    assert kept == 4 * OPERAND + B * H * 128 * 4 + 2 * 8 + mask


def test_cudnn_keeps_a_number_a_row():
    kept, _ = kept_bytes(HOPPER, causal, tokens=T)
    assert kept == 4 * OPERAND + B * H * T * 4 + 2 * 8


def test_unfused_attention_keeps_scores_in_float32():
    kept, choices = kept_bytes(TURING, causal, tokens=T, dtype=BRAIN)
    scores = B * H * T * T * 4
    assert kept >= scores + 4 * OPERAND
    assert "tokens x tokens" in choices[0]


def test_recomputation_takes_the_same_kernel():
    from torch.utils.checkpoint import checkpoint

    with VirtualGPU(make_gpu(AMPERE)) as gpu:
        operands = qkv(device=gpu.device)
        checkpoint(causal, *operands, use_reentrant=False).sum().backward()
        assert gpu.choices == ["attention: flash kernel"]
        assert operands[0].grad.shape == operands[0].shape


def test_nothing_is_kept_in_evaluation():
    with VirtualGPU(make_gpu(TURING)) as gpu, torch.no_grad():
        before = gpu.recorder.live_bytes
        operands = qkv(device=gpu.device, dtype=HALF)
        output = causal(*operands)
        made = sum(tensor.nbytes for tensor in (*operands, output))
        assert gpu.recorder.live_bytes - before == made


# --- models -----------------------------------------------------------------------------------------------------------


def llama(**options):
    config = hf.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    with torch.device("meta"):
        return hf.AutoModelForCausalLM.from_config(config, dtype=BRAIN, **options)


@pytest.mark.parametrize("documents", [1, 2])
def test_flash_attention_2_runs_without_the_package(documents):
    with VirtualGPU(make_gpu(AMPERE)) as gpu:
        model = gpu.place(llama(attn_implementation="flash_attention_2"))
        ids = torch.zeros(1, 32, dtype=torch.long).to(gpu.device)
        positions = torch.arange(32 // documents).repeat(documents)[None].to(gpu.device)
        model(input_ids=ids, labels=ids, position_ids=positions, use_cache=False).loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        assert gpu.choices == ["attention: flash-attn 2, which has to be installed where the run is"]
    with pytest.raises(ImportError):
        llama(attn_implementation="flash_attention_2")  # transformers is as it was


def test_flash_attention_2_needs_ampere():
    with VirtualGPU(make_gpu(TURING)) as gpu:
        model = gpu.place(llama(attn_implementation="flash_attention_2"))
        ids = torch.zeros(1, 32, dtype=torch.long).to(gpu.device)
        with pytest.raises(UserError, match=r"needs compute capability 8\.0 or later \(Ampere\), got"):
            model(input_ids=ids)


@pytest.mark.parametrize("capability", [TURING, AMPERE])
@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_mixtures_of_experts_train(experts, capability):
    config = hf.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    )
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(config, dtype=BRAIN, experts_implementation=experts)
    with VirtualGPU(make_gpu(capability)) as gpu:
        gpu.place(model)
        ids = torch.zeros(1, 16, dtype=torch.long).to(gpu.device)
        model(input_ids=ids, labels=ids).loss.backward()
        names = {entry.name for entry in gpu.work.entries}
    grouped = {name for name in names if "grouped_mm" in name}
    if experts != "grouped_mm":
        assert not grouped
    elif capability == AMPERE:
        assert grouped == {"_grouped_mm"}
    else:
        assert "grouped_mm_fallback" in grouped
        assert "_grouped_mm" not in grouped


# --- the same questions asked of the virtual GPU as of a real one -----------------------------------------------------


def test_auto_takes_sdpa_on_a_virtual_gpu_and_says_how_to_count_on_flash_attn():
    with VirtualGPU(make_gpu(AMPERE)) as gpu:
        choice = choose_attention(
            "auto", config=hf.LlamaConfig(), device=gpu.device, compute_dtype=BRAIN, packing=True
        )
    assert choice.implementation == "sdpa"
    assert "may not have; ask for it" in choice.reason


def test_requests_are_checked_against_the_virtual_gpu():
    ask = {"config": hf.LlamaConfig(), "compute_dtype": HALF}
    with VirtualGPU(make_gpu(AMPERE)) as gpu:
        assert choose_attention("flash_attention_2", device=gpu.device, **ask).implementation
        with pytest.raises(UserError, match="flex_attention compiles a kernel"):
            choose_attention("flex_attention", device=gpu.device, **ask)
    with (
        VirtualGPU(make_gpu(TURING)) as gpu,
        pytest.raises(UserError, match=r"8\.0 or later \(Ampere\), got 7\.5"),
    ):
        choose_attention("flash_attention_2", device=gpu.device, **ask)


def test_precision_and_optimizers_see_a_cuda_device():
    with VirtualGPU(make_gpu(TURING)) as gpu:
        with pytest.raises(UserError, match=r"bfloat16 needs a GPU that computes with it .* on Test"):
            check_precision("bfloat16", "no", gpu.device)
        check_precision("float32", "fp16", gpu.device)
        pytest.importorskip("bitsandbytes")
        check_optimizer(OptimizerConfig(name="paged_adamw_8bit"), gpu.device)


def test_scale_comes_from_the_head_size_before_padding(monkeypatch):
    scales = []
    original = torch.ops.aten._scaled_dot_product_flash_attention

    def spy(*args, scale):
        scales.append(scale)
        return original(*args, scale=scale)

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention", spy)
    kept_bytes(AMPERE, causal, size=60)
    assert scales == [pytest.approx(1 / math.sqrt(60))]
