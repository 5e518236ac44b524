"""Liger's operators on a virtual GPU: the bytes that their functions allocate, with Triton installed here or not."""

import pytest
import torch

from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.virtual_gpu.gpu import VirtualGPU

pytest.importorskip("liger_kernel", reason="Liger needs Triton, which this system has not")

GPU = "a100-80gb"
B, S, H, F, V = 2, 512, 1024, 4096, 32_000
N = B * S
BF16, FP32 = 2, 4


@pytest.fixture(name="gpu", scope="module")
def _gpu():
    with VirtualGPU(GPU) as gpu:
        yield gpu


def leaf(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def both_passes(gpu, function, *inputs):
    """Run forward and backward: bytes that forward leaves and both take at most, and the work."""
    before, done = gpu.recorder.live_bytes, len(gpu.work.entries)
    gpu.recorder.reset_peak()
    results = function(*inputs)
    kept = gpu.recorder.live_bytes - before
    results = results if isinstance(results, tuple) else (results,)
    torch.autograd.backward(results, [torch.ones_like(one) for one in results])
    launched = {entry.name: entry.num_bytes for entry in gpu.work.entries[done:]}
    return kept, gpu.recorder.peak_bytes - before, launched


def test_rms_norm_keeps_a_number_a_row_and_sums_its_weights_gradient_once_a_multiprocessor(gpu):
    from liger_kernel.ops import LigerRMSNormFunction

    kept, peak, launched = both_passes(
        gpu,
        lambda x, weight: LigerRMSNormFunction.apply(x, weight, 1e-6, 0.0, "llama", True),
        leaf(B, S, H),
        leaf(H),
    )
    result = N * H * BF16
    rows = N * FP32
    shares = find_gpu(GPU).num_multiprocessors * H * FP32
    assert kept == result + rows
    assert peak == kept + result + shares + H * (
        FP32 + BF16
    )  # the input's gradient is written into the result's
    assert launched["_rms_norm_forward_kernel"] == 2 * result + rows + H * BF16
    assert launched["_rms_norm_backward_kernel"] == 3 * result + rows + H * BF16 + shares


def test_swiglu_writes_its_gradients_into_its_inputs(gpu):
    from liger_kernel.ops import LigerSiLUMulFunction

    a, b = leaf(B, S, F), leaf(B, S, F)
    kept, peak, launched = both_passes(gpu, lambda a, b: LigerSiLUMulFunction.apply(a, b), a, b)
    one = N * F * BF16
    assert (kept, peak) == (one, 2 * one)
    assert a.grad is not None
    assert a.grad.untyped_storage()._cdata == a.untyped_storage()._cdata
    assert launched["_swiglu_forward_kernel"] == 3 * one
    assert launched["_swiglu_backward_kernel"] == 5 * one


def test_rotary_embeddings_turn_copies_in_place(gpu):
    from liger_kernel.ops import LigerRopeFunction

    cos, sin = (torch.ones(1, S, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    kept, peak, launched = both_passes(
        gpu, lambda q, k: LigerRopeFunction.apply(q, k, cos, sin), leaf(B, 16, S, 64), leaf(B, 4, S, 64)
    )
    both = N * (16 + 4) * 64 * BF16
    assert kept == both
    assert peak == 3 * both  # gradients of the results, which become those of the inputs in another order
    assert launched["_triton_rope"] == 2 * both + 2 * S * 64 * BF16


def test_the_fused_loss_holds_logits_of_one_chunk_and_both_gradients(gpu):
    from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction

    hidden, weight = leaf(N, H), leaf(V, H)
    hidden.detach() @ weight.detach()[:8].t()  # the library's workspace stays
    targets = torch.zeros(N, dtype=torch.long, device="cuda")
    done = len(gpu.work.entries)
    kept, peak, launched = both_passes(
        gpu,
        lambda x, weight: LigerFusedLinearCrossEntropyFunction.apply(x, weight, targets)[0],
        hidden,
        weight,
    )
    rows = 32  # as many as make the logits no larger than the hidden states, a power of two
    gradients = (N + V) * H * BF16
    assert kept == gradients + FP32
    assert peak == gradients + rows * V * BF16 + N * (FP32 + 1)  # losses, and which tokens count
    assert launched["liger_cross_entropy_kernel"] == 3 * rows * V * BF16 + rows * (8 + FP32)
    products = [entry for entry in gpu.work.entries[done:] if entry.flops]
    assert sum(entry.flops for entry in products) == 3 * 2 * N * H * V


# Liger 0.8.5 calls the cache by its name before transformers 5.24.
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.usefixtures("llama_as_it_was")
def test_a_model_with_ligers_kernels_learns_in_less_memory(gpu):
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.integrations.liger import apply_liger_kernel

    def peak(is_fused):
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=256,
                intermediate_size=688,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                vocab_size=V,
            )
        ).to("cuda", torch.bfloat16)
        if is_fused:
            apply_liger_kernel(model, None)
        model.train()
        rows = torch.ones(B, S, dtype=torch.long, device="cuda")
        before = gpu.recorder.live_bytes
        gpu.recorder.reset_peak()
        model(input_ids=rows, labels=rows).loss.backward()
        return gpu.recorder.peak_bytes - before

    logits = N * V * FP32
    assert peak(is_fused=True) < peak(is_fused=False) - 2 * logits
