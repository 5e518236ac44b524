"""A weight's gradient from chunks of tokens is that of one product, in no more memory than it says."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker
from lowmem_ft.techniques.gradients.weight_gradient import WeightGradient
from lowmem_ft.virtual_gpu.gpu import VirtualGPU

OUT, IN = 24, 16
TOKENS_THAT_WAIT = OUT * IN * 4 // ((OUT + IN) * 2)


def factors(num_tokens, dtype):
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(num_tokens, size, generator=generator).to(dtype) for size in (OUT, IN))


def summed(d_output, input, chunk, dtype=None):
    gradient = WeightGradient(torch.Size((OUT, IN)), dtype or input.dtype, input.device, len(input))
    for start in range(0, len(input), chunk):
        gradient.add(d_output[start : start + chunk], input[start : start + chunk])
    return gradient.finish()


@pytest.mark.parametrize("chunk", [1, 3, 8, 100])
@pytest.mark.parametrize("num_tokens", [1, 7, TOKENS_THAT_WAIT, TOKENS_THAT_WAIT + 1, 60])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_it_is_one_product_rounded_once(dtype, num_tokens, chunk):
    d_output, input = factors(num_tokens, dtype)
    exact = d_output.double().t() @ input.double()
    ours = summed(d_output, input, chunk)
    assert ours.dtype == dtype
    rounding = torch.finfo(dtype).eps / 2
    # Products of chunks are rounded before they are summed where the sum is in another type.
    slack = 3 if dtype == torch.bfloat16 and num_tokens > TOKENS_THAT_WAIT else 1.01
    tolerance = slack * rounding if dtype == torch.bfloat16 else 1e3 * rounding
    assert (ours.double() - exact).norm() <= tolerance * exact.norm()


def test_what_waits_gives_the_bits_of_one_product():
    d_output, input = factors(TOKENS_THAT_WAIT, torch.bfloat16)
    assert torch.equal(summed(d_output, input, 3), d_output.t() @ input)


def test_factors_in_a_shorter_type_than_the_weight():
    d_output, input = factors(60, torch.bfloat16)
    ours = summed(d_output, input, 60, dtype=torch.float32)
    assert torch.equal(ours, (d_output.t() @ input).float())


def test_no_chunk_gives_zeros():
    gradient = WeightGradient(torch.Size((2, 3)), torch.bfloat16, torch.device("cpu"), 0).finish()
    assert torch.equal(gradient, torch.zeros(2, 3, dtype=torch.bfloat16))


def test_few_tokens_wait_and_take_no_sum():
    d_output, input = factors(TOKENS_THAT_WAIT, torch.bfloat16)
    gradient = WeightGradient(torch.Size((OUT, IN)), torch.bfloat16, torch.device("cpu"), len(input))
    with StorageTracker() as tracker:
        for token in range(len(input)):
            gradient.add(d_output[token : token + 1], input[token : token + 1])
        assert tracker.live_bytes == 0
        finished = gradient.finish()
    assert tracker.live_bytes == finished.nbytes == OUT * IN * 2


def test_many_tokens_are_summed_a_quarter_of_the_sum_at_a_time():
    d_output, input = factors(TOKENS_THAT_WAIT * 8, torch.bfloat16)
    gradient = WeightGradient(torch.Size((OUT, IN)), torch.bfloat16, torch.device("cpu"), len(input))
    sum_bytes, chunk_bytes, most_alive = OUT * IN * 4, (OUT + IN) * 2, 0
    with StorageTracker() as tracker:
        for token in range(len(input)):
            chunk = d_output[token : token + 1].clone(), input[token : token + 1].clone()
            gradient.add(*chunk)
            del chunk
            most_alive = max(most_alive, tracker.live_bytes)
    assert sum_bytes < most_alive <= sum_bytes * 5 / 4 + chunk_bytes


OPTION = {
    "bfloat16": "allow_bf16_reduced_precision_reduction",
    "float16": "allow_fp16_reduced_precision_reduction",
}


class SeenByProducts(TorchDispatchMode):
    """What cuBLAS would be told at each matrix product."""

    def __init__(self, read):
        super().__init__()
        self.read, self.options = read, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self.options.append(self.read())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("own", [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("num_tokens", [TOKENS_THAT_WAIT, 60])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cublas_sums_in_float32_and_the_users_setting_stays(dtype, num_tokens, own):
    """On a CPU the options change nothing: that they are set during each product is all that can be seen."""
    option, matmul = OPTION[str(dtype).removeprefix("torch.")], torch.backends.cuda.matmul

    def read():
        return getattr(matmul, option), getattr(matmul, f"{option}_split_k")

    before = read()
    setattr(matmul, option, own)
    try:
        with SeenByProducts(read) as seen:
            summed(*factors(num_tokens, dtype), 8)
        assert set(seen.options) == {(False, own[1])}
        assert read() == own
    finally:
        setattr(matmul, option, before)


@pytest.mark.parametrize("num_tokens", [TOKENS_THAT_WAIT, 60])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_first_product_is_written_and_not_added_to_zeros(dtype, num_tokens):
    with VirtualGPU("a100-80gb") as gpu:
        d_output, input = (one.cuda() for one in factors(num_tokens, dtype))
        d_output.t() @ input  # the library's workspace stays
        done = len(gpu.work.entries)
        gpu.recorder.reset_peak()
        before = gpu.recorder.live_bytes
        gradient = summed(d_output, input, num_tokens)
        taken = gpu.recorder.peak_bytes - before
        launched = [entry.name for entry in gpu.work.entries[done:] if entry.kind == "kernel"]
    assert launched == (
        ["mm"] if dtype == torch.float32 or num_tokens == TOKENS_THAT_WAIT else ["mm", "copy_", "_to_copy"]
    )
    if len(launched) == 1:
        assert taken == gradient.nbytes
