"""Calls that run on a CPU, or on another GPU, and stop on CUDA stop on the virtual GPU, in CUDA's words."""

from __future__ import annotations

import re

import numpy
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lowmem_ft.virtual_gpu.checks.device_mismatches import _checking_wrappers
from lowmem_ft.virtual_gpu.gpu import VirtualGPU

aten = torch.ops.aten
BF16, F16, F64, F8 = torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn
ON_TWO = "Expected all tensors to be on the same device, but "


def cuda(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def host(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def indices(device: str, dtype: torch.dtype = torch.long) -> Tensor:
    return torch.zeros(3, dtype=dtype, device=device)


def heads(dtype: torch.dtype) -> list[Tensor]:
    return [cuda(1, 2, 64, 64, dtype=dtype) for _ in range(3)]


def fused_adamw(weights: Tensor, gradients: Tensor, steps: Tensor) -> None:
    torch._fused_adamw_(
        *([weights], [gradients], [cuda(3)], [cuda(3)], [], [steps]),
        lr=0.1,
        beta1=0.9,
        beta2=0.9,
        weight_decay=0.0,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
    )


@pytest.fixture(params=["a100-80gb"])
def gpu(request):
    with VirtualGPU(request.param) as gpu:
        yield gpu


on = pytest.mark.parametrize
DEVICES = {
    "kernel": (
        lambda: cuda(3, 3) @ host(3, 3),
        ON_TWO + "got mat2 is on cpu, different from other tensors on cuda:0 "
        "(when checking argument in method wrapper_CUDA_mm)",
    ),
    "number in a kernel": (
        lambda: torch.addmm(host(), cuda(3, 3), cuda(3, 3)),
        ON_TWO + "got mat1 is on cuda:0, different from other tensors on cpu",
    ),
    "list": (lambda: torch.cat([cuda(3), host(3)]), ON_TWO + "got tensors is on cpu"),
    "kernel behind a composite": (
        lambda: F.embedding(indices("cpu"), cuda(3, 3)),
        ON_TWO + "found at least two devices, cuda:0 and cpu!",
    ),
    "targets": (lambda: F.cross_entropy(cuda(3, 5), indices("cpu")), ON_TWO + "got target is on cpu"),
    "comparison": (lambda: torch.equal(cuda(3), host(3)), "wrapper_CUDA__equal"),
    "mask": (lambda: cuda(3).masked_select(torch.ones(3, dtype=torch.bool)), "wrapper_CUDA__masked_select"),
    "pointwise": (lambda: cuda(3) + host(3), ON_TWO + "found at least two devices, cuda:0 and cpu!"),
    "number of cuda on the host": (lambda: host(3) * cuda(), "found at least two devices, cpu and cuda:0!"),
    "foreach": (
        lambda: torch._foreach_add_([cuda(3), cuda(3)], [cuda(3), host(3)]),
        "found at least two devices, cuda:0 and cpu!",
    ),
    "foreach with a number": (lambda: torch._foreach_mul_([host(3)], cuda()), "cpu and cuda:0!"),
    "convolution": (
        lambda: F.conv1d(cuda(1, 3, 8), host(4, 3, 3)),
        "Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the same",
    ),
    "indices of cuda on the host": (
        lambda: host(3, 3)[indices("cuda")],
        "indices should be either on cpu or on the same device as the indexed tensor (cpu)",
    ),
    "mask of cuda on the host": (lambda: host(3)[cuda(3) > 0], "indices should be either on cpu"),
    "steps of an optimizer": (
        lambda: fused_adamw(cuda(3), cuda(3), host()),
        ON_TWO + "got state_steps is on cpu",
    ),
    "random numbers of the host": (
        lambda: torch.randn(3, device="cuda", generator=torch.Generator()),
        "Expected a 'cuda' device type for generator but found 'cpu'",
    ),
    "random numbers of cuda": (
        lambda: torch.randn(3, generator=torch.Generator("cuda")),
        "Expected a 'cpu' device type for generator but found 'cuda'",
    ),
    "random numbers in place": (
        lambda: cuda(3).normal_(generator=torch.Generator()),
        "Expected a 'cuda' device type for generator but found 'cpu'",
    ),
    "pinned": (
        lambda: cuda(3).pin_memory(),
        "cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned",
    ),
    "made and pinned": (
        lambda: torch.empty(3, device="cuda", pin_memory=True),
        "Only dense CPU tensors can be pinned",
    ),
}


@on("call, words", DEVICES.values(), ids=DEVICES)
def test_tensors_on_the_wrong_device_are_refused(call, words, gpu):
    for _ in range(2):  # the second time what operators return is known
        with pytest.raises(RuntimeError, match=re.escape(words)):
            call()


TAKEN = {
    "number of the host": lambda: cuda(3) + host(),
    "two numbers": lambda: cuda(3).addcdiv(host(), cuda(3)),
    "fill": lambda: cuda(3).masked_fill(cuda(3) > 0, host()),
    "where": lambda: torch.where(cuda(3) > 0, cuda(3), host()),
    "indices of the host": lambda: cuda(3, 3)[indices("cpu")],
    "mask of the host": lambda: cuda(3, 3)[torch.ones(3, dtype=torch.bool)],
    "assignment by the host's indices": lambda: cuda(3, 3).index_put_((indices("cpu"),), cuda(3)),
    "foreach of both": lambda: torch._foreach_add_([cuda(3), host(3)], [cuda(3), host(3)]),
    "foreach with the host's number": lambda: torch._foreach_mul_([cuda(3)], host()),
    "foreach copy": lambda: torch._foreach_copy_([cuda(3)], [host(3)]),
    "copy": lambda: host(3).copy_(cuda(3)),
    "random numbers": lambda: torch.randn(3, device="cuda", generator=torch.Generator("cuda")),
    "values by force": lambda: cuda(3).numpy(force=True),
}


@on("call", TAKEN.values(), ids=TAKEN)
def test_what_cuda_takes_from_both_devices_is_taken(call, gpu):
    call()
    assert any(work.kind in ("kernel", "copy", "synchronize") for work in gpu.work.entries)


def test_what_torch_itself_refuses_names_cuda_to_whoever_hears_of_it_outside():
    with pytest.raises(RuntimeError, match=r"type 'cpu' to a tensor with device type 'cuda'"), VirtualGPU():
        cuda(3).grad = host(3)


def test_which_operators_are_checked_is_torchs_own_list():
    wrappers = _checking_wrappers()
    assert len(wrappers) > 500
    assert wrappers["index_select"] == "wrapper_CUDA__index_select"
    assert not wrappers.keys() & {"add.Tensor", "copy_", "index.Tensor", "_to_copy", "where.self"}


def test_values_of_the_device_are_not_read_by_the_host(gpu):
    for read in (Tensor.numpy, numpy.asarray):
        with pytest.raises(
            TypeError, match=r"can't convert cuda:0 device type tensor to numpy\. Use Tensor\.cpu"
        ):
            read(cuda(3))
    with pytest.raises(RuntimeError, match="Can't call numpy\\(\\) on Tensor that requires grad"):
        host(3).requires_grad_().numpy()
    assert cuda(3).cpu().numpy().shape == (3,)


TYPES = {
    "product": (
        lambda: cuda(3, 3) @ cuda(3, 3, dtype=BF16),
        "expected mat1 and mat2 to have the same dtype, but got: float != c10::BFloat16",
    ),
    "added": (
        lambda: F.linear(cuda(3, 3), cuda(3, 3), cuda(3, dtype=F16)),
        "self and mat2 must have the same dtype, but got Half and Float",
    ),
    "products": (
        lambda: torch.bmm(cuda(2, 3, 3, dtype=BF16), cuda(2, 3, 3)),
        "expected scalar type BFloat16 but found Float",
    ),
    "integers": (
        lambda: indices("cuda")[None] @ indices("cuda"),
        "\"addmv_impl_cuda\" not implemented for 'Long'",
    ),
    "eight bits": (
        lambda: cuda(16, 16, dtype=F8) @ cuda(16, 16, dtype=F8),
        "\"addmm_cuda\" not implemented for 'Float8_e4m3fn'",
    ),
    "arithmetic of eight bits": (
        lambda: cuda(3, dtype=F8) * 2,
        "\"mul_cuda\" not implemented for 'Float8_e4m3fn'",
    ),
    "convolution": (
        lambda: F.conv1d(cuda(1, 3, 8, dtype=BF16), cuda(4, 3, 3)),
        "Input type (torch.cuda.BFloat16Tensor) and weight type (torch.cuda.FloatTensor) should be the same",
    ),
    "norm": (
        lambda: F.layer_norm(cuda(3, 3, dtype=BF16), (3,), cuda(3)),
        "expected scalar type BFloat16 but found Float",
    ),
    "norm of groups": (
        lambda: F.group_norm(cuda(2, 4, 3, dtype=BF16), 2, cuda(4), cuda(4)),
        "expected scalar type BFloat16 but found Float",
    ),
    "sum of products": (
        lambda: torch.addbmm(cuda(3, 3), cuda(2, 3, 3), cuda(2, 3, 3, dtype=BF16)),
        "expected scalar type Float but found BFloat16",
    ),
    "targets": (
        lambda: F.nll_loss(cuda(3, 5), indices("cuda", torch.int32)),
        "\"nll_loss_forward_reduce_cuda_kernel_2d_index\" not implemented for 'Int'",
    ),
    "scaled gradients": (
        lambda: torch._amp_foreach_non_finite_check_and_unscale_([cuda(3, dtype=BF16)], cuda(1), cuda(1)),
        "\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'",
    ),
    "fused optimizer": (
        lambda: fused_adamw(indices("cuda"), cuda(3), cuda()),
        "\"fused_adamw_kernel_cuda\" not implemented for 'Long'",
    ),
    "flash attention": (
        lambda: aten._scaled_dot_product_flash_attention(*heads(torch.float32)),
        "FlashAttention only support fp16 and bf16 data type",
    ),
    "memory-efficient attention": (
        lambda: aten._scaled_dot_product_efficient_attention(*heads(F64), None, False),
        "cutlassF: no kernel found to launch!",
    ),
}


@on("call, words", TYPES.values(), ids=TYPES)
def test_types_without_a_kernel_are_refused(call, words, gpu):
    with pytest.raises(RuntimeError, match=re.escape(words)):
        call()


def test_types_that_go_together_are_taken(gpu):
    factors = cuda(3, 3, dtype=BF16), cuda(3, 3, dtype=BF16)
    assert torch.mm(*factors, out_dtype=torch.float32).dtype == torch.float32
    assert torch.addmm(cuda(3, 3), *factors, out_dtype=torch.float32).dtype == torch.float32
    assert F.batch_norm(cuda(3, 3, dtype=BF16), cuda(3), cuda(3)).dtype == BF16
    assert cuda(3, dtype=F8).to(BF16).to(F8).dtype == F8
    with torch.autocast("cuda", BF16):
        assert F.linear(cuda(3, 3), cuda(3, 3, dtype=BF16), cuda(3)).dtype == BF16


NEWER = {
    "flash attention": (
        ("t4", "rtx-3090"),
        lambda: aten._scaled_dot_product_flash_attention(*heads(BF16)),
        "FlashAttention only supports Ampere GPUs or newer.",
    ),
    "bfloat16 in attention": (
        ("t4", "rtx-3090"),
        lambda: aten._scaled_dot_product_efficient_attention(*heads(BF16), None, False),
        "cutlassF: no kernel found to launch!",
    ),
    "products of eight bits": (
        ("a100-80gb", "rtx-4090"),
        lambda: torch._scaled_mm(
            *(cuda(16, 16, dtype=F8), cuda(16, 16, dtype=F8).t(), cuda(), cuda()), out_dtype=BF16
        ),
        "torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9",
    ),
}


@on("names, call, words", NEWER.values(), ids=NEWER)
def test_a_kernel_begins_with_the_gpus_it_is_made_for(names, call, words):
    """The newer one goes first: what it has shown of results is not taken for the older one's."""
    older, newer = names
    with VirtualGPU(newer):
        call()
    with VirtualGPU(older), pytest.raises(RuntimeError, match=re.escape(words)):
        call()
