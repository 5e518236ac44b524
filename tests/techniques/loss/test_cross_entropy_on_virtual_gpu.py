"""The loss's Triton kernel on virtual GPUs: what a trace counts for it, and when it takes it. No Triton is needed."""

import dataclasses

import pytest
import torch

from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.techniques.loss.linear_cross_entropy import linear_cross_entropy_sum
from lowmem_ft.virtual_gpu.gpu import VirtualGPU

N, H, V, CHUNK = 512, 64, 2**15, 256
KERNEL = "cross_entropy_in_triton"
CAPPED = {"logit_softcap": 30.0, "label_smoothing": 0.1, "logit_scale": 0.5}


def loss_on(spec, dtype=torch.bfloat16, learns=True, **options):
    """The kernels of one loss without a gradient of the weight, and the bytes that it takes at the most."""
    with VirtualGPU(spec) as gpu:
        hidden = torch.zeros(N, H, dtype=dtype, device="cuda", requires_grad=learns)
        weight = torch.zeros(V, H, dtype=dtype, device="cuda")
        labels = torch.zeros(N, dtype=torch.int64, device="cuda")
        hidden.detach() @ weight[:8].t()  # the library's workspace stays
        recorder = gpu.recorder
        recorder.reset_peak()
        before, num_entries = recorder.live_bytes, len(recorder.work.entries)
        linear_cross_entropy_sum(hidden, weight, labels, chunk_tokens=CHUNK, **options)
        kernels = [work for work in recorder.work.entries[num_entries:] if work.kind == "kernel"]
        return [work for work in kernels for _ in range(work.times)], recorder.peak_bytes - before


def moved_by_kernel(kernels):
    return sum(work.num_bytes for work in kernels if work.name == KERNEL) / (N * V)


@pytest.mark.parametrize("options", [{}, CAPPED], ids=["plain", "capped"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_chunk_is_read_twice_and_written_once_and_copied_nowhere(dtype, options):
    kernels, taken = loss_on("a100-80gb", dtype, **options)
    launched = [work for work in kernels if work.name == KERNEL]
    assert len(launched) == N // CHUNK
    assert all(work.by_triton for work in launched)  # for the clock's host
    assert moved_by_kernel(kernels) == pytest.approx(3 * dtype.itemsize, rel=0.01)
    others = sum(work.num_bytes for work in kernels if work.name not in (KERNEL, "mm"))
    assert others < 0.05 * N * V
    assert taken == pytest.approx(dtype.itemsize * CHUNK * V, rel=0.02)


def test_an_evaluation_reads_logits_once():
    kernels, _ = loss_on("a100-80gb", learns=False)
    assert moved_by_kernel(kernels) == pytest.approx(2, rel=0.01)


def test_tiles_read_logits_for_the_loss_and_again_for_the_gradients():
    kernels, taken = loss_on("a100-80gb", vocabulary_tiles=4)
    assert moved_by_kernel(kernels) == pytest.approx(2 + 2 * 2, rel=0.01)
    assert taken == pytest.approx(2 * CHUNK * V / 4, rel=0.1)


def test_it_takes_a_sixth_of_the_operations_bytes_and_a_third_of_their_memory():
    (of_kernel, taken), (of_operations, taken_by_them) = (
        loss_on("a100-80gb", kernel=kernel) for kernel in ("auto", "eager")
    )
    moved = [sum(work.num_bytes for work in one if work.name != "mm") for one in (of_kernel, of_operations)]
    assert moved[0] < moved[1] / 6
    assert taken == pytest.approx(taken_by_them / 3, rel=0.02)
    assert len(of_kernel) < len(of_operations) / 2


WITHOUT_TRITON = dataclasses.replace(find_gpu("a100-80gb"), has_triton=False)


@pytest.mark.parametrize(
    "spec,options",
    [
        ("t4", {}),
        (WITHOUT_TRITON, {}),
        ("a100-80gb", {"kernel": "eager"}),
        ("a100-80gb", {"dtype": torch.float64}),
    ],
    ids=["Turing", "without Triton", "told to", "double"],
)
def test_what_the_kernel_does_not_take_is_traced_operation_by_operation(spec, options):
    kernels, _ = loss_on(spec, **options)
    assert KERNEL not in {work.name for work in kernels}
    assert len(kernels) > 10 * N // CHUNK


def test_demanding_it_is_refused_where_the_real_gpu_would():
    with pytest.raises(
        UserError, match=r"The Triton cross entropy was requested, but it needs compute capability"
    ):
        loss_on("t4", kernel="triton")
