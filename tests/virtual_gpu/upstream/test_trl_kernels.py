"""TRL's heads on the virtual GPU take the bytes of their Triton kernels, not those of the same steps in torch."""

import pytest
import torch
from trl.trainer import utils

from lowmem_ft.foundation.upstream.tested import is_before
from lowmem_ft.virtual_gpu.costs.workspaces import cublas_workspace_bytes
from lowmem_ft.virtual_gpu.gpu import VirtualGPU

if is_before("trl", (1, 16)):
    pytest.skip("TRL's own kernels are followed from 1.16 on", allow_module_level=True)
from trl.kernels import chunked_logprob

N, H, V, TILE = 5000, 64, 40_000, 32_768
ROWS = chunked_logprob.TOKEN_CHUNK_SIZE


def head(gpu):
    """Forward and backward over a head with bfloat16 weights: peak bytes above what it was given, and its work."""
    hidden_NH = torch.randn(N, H, device=gpu.device, dtype=torch.bfloat16, requires_grad=True)
    weight_VH = torch.randn(V, H, device=gpu.device, dtype=torch.bfloat16, requires_grad=True)
    targets_N = torch.zeros(N, device=gpu.device, dtype=torch.long)
    hidden_NH.detach() @ weight_VH.detach().t()[:, :8]  # the library's workspace stays
    before, done = gpu.recorder.live_bytes, len(gpu.work.entries)
    gpu.recorder.reset_peak()
    log_probs, *_ = chunked_logprob.ChunkedLogProbFunction.apply(
        hidden_NH, weight_VH, None, targets_N, 1.0, TILE, None, 1.0, ("log_probs",)
    )
    log_probs.sum().backward()
    return gpu.recorder.peak_bytes - before, gpu.work.entries[done:]


def test_the_head_holds_one_tile_in_its_own_type_and_gradients_in_float32():
    with VirtualGPU("a100-80gb") as gpu:
        taken, _ = head(gpu)
    tile, gradients = ROWS * TILE * 2, (N + V) * H * (4 + 2)
    workspace = cublas_workspace_bytes((8, 0))  # of autograd's thread
    assert taken == pytest.approx(tile + gradients + workspace, rel=0.001)


def test_each_tile_is_read_forward_and_read_and_written_backward():
    with VirtualGPU("a100-80gb") as gpu:
        _, work = head(gpu)
    passes = [entry for entry in work if entry.name in ("_forward_kernel", "_backward_kernel")]
    tiles = [rows * columns * 2 for rows in (ROWS, N - ROWS) for columns in (TILE, V - TILE)]
    moved = [entry.num_bytes for entry in passes]
    assert moved == pytest.approx(
        [*tiles, *(2 * tile for tile in tiles)], rel=0.005
    )  # and a few numbers a row
    products = [entry for entry in work if entry.flops]
    assert {entry.dtype for entry in products} == {"bfloat16"}
    assert sum(entry.flops for entry in products) == 4 * 2 * N * H * V


def test_the_clock_counts_what_a_product_writes_into_once():
    with VirtualGPU("a100-80gb") as gpu:
        left, right = (torch.ones(64, 64, device=gpu.device) for _ in range(2))
        torch.mm(left, right, out=torch.empty(64, 64, device=gpu.device))
    (product,) = (entry for entry in gpu.work.entries if entry.flops)
    assert product.num_bytes == 3 * 64 * 64 * 4


def test_positions_without_a_label_are_left_out_and_the_host_waits_for_their_number():
    with VirtualGPU("a100-80gb") as gpu:
        labels = torch.tensor([[1] * 10 + [-100] * 6]).to(gpu.device)
        hidden = torch.ones(1, 16, H, device=gpu.device)
        waits = gpu.work.num_host_waits
        assert hidden[labels != -100].shape == (10, H)
        assert gpu.work.num_host_waits == waits + 1


def test_trl_is_as_before_behind_the_block():
    before = dict(vars(chunked_logprob)), utils._use_triton
    with VirtualGPU("a100-80gb"):
        assert chunked_logprob._use_triton(torch.device("vgpu"))
        assert not utils._use_triton(torch.device("cpu"))
    assert (dict(vars(chunked_logprob)), utils._use_triton) == before
