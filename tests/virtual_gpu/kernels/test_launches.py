"""Operators of torch that are several kernels on CUDA count as several."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowmem_ft.virtual_gpu.calls.work import Work
from lowmem_ft.virtual_gpu.costs import launches as rules
from lowmem_ft.virtual_gpu.costs.launches import launches_of
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.replay.timing.clock import Clock

aten = torch.ops.aten
HEADER = Path(torch.__file__).parent / "include/ATen/native/cuda/MultiTensorApply.cuh"


def counted(program, gpu_name="a100-80gb") -> dict[str, int]:
    """Launches by operator of what a program does on a virtual GPU."""
    gpu = VirtualGPU(gpu_name)
    with gpu:
        program(gpu.device)
    found: dict[str, int] = {}
    for work in gpu.recorder.work.entries:
        if work.kind == "kernel":
            found[work.name] = found.get(work.name, 0) + work.num_launches
    return found


# --- lists of tensors -------------------------------------------------------------------------------------------------


def as_torch_fills_launches(sizes: list[int], most_tensors: int, most_chunks: int, chunk: int) -> int:
    """The loops of ``multi_tensor_apply``, chunk by chunk."""
    launches = tensors = chunks = 0
    for size in filter(None, sizes):
        tensors += 1
        of_tensor = -(-size // chunk)
        for number in range(of_tensor):
            chunks += 1
            is_last = number == of_tensor - 1
            if (tensors == most_tensors and is_last) or chunks == most_chunks:
                launches, chunks, tensors = launches + 1, 0, 0 if is_last else 1
    return launches + bool(chunks)


@pytest.mark.parametrize(
    "sizes",
    [
        [10],
        [65536 * 2240],
        [65536 * 2240 + 1],
        [65536 * 5000, 3, 0, 65536 * 1720 - 3],
        [1] * 447,
        [1] * 448,
        [1] * 449,
        [65536 * 300, 65536 * 20_000, 65536 * 7000 + 1, 65536],
        [7] * 10_000,
    ],
)
def test_lists_fill_launches_as_torch_fills_them(sizes):
    tensors = [torch.empty(size, device="meta") for size in sizes]
    found = launches_of(aten._foreach_add_.List, (tensors, tensors), {}, None)
    assert rounded_up(found) == as_torch_fills_launches(sizes, 448, 2240, 65536)


def test_lists_of_large_tensors_and_many_small_ones_are_overrated_by_two_at_most():
    sizes = [65536 * 1793, *[1] * 447, 65536 * 9000, *[1] * 900]
    tensors = [torch.empty(size, device="meta") for size in sizes]
    found = rounded_up(launches_of(aten._foreach_add_.List, (tensors, tensors), {}, None))
    least = as_torch_fills_launches(sizes, 448, 2240, 65536)
    assert least <= found <= 2 * least


def rounded_up(launches):
    return Work("kernel", 0, launches=launches).num_launches


def test_limits_of_lists_are_those_of_the_torch_that_is_installed():
    text = HEADER.read_text().split("CUDART_VERSION >= 13000")[1].split("#else")[0]

    def numbers(name):
        return tuple(map(int, re.search(rf"{name}\[5\] =\s*{{([^}}]*)}}", text).group(1).split(",")))

    assert numbers("depth_to_max_tensors") == rules._MOST_TENSORS
    assert numbers("depth_to_max_tensors_scalarlist") == rules._MOST_TENSORS_WITH_SCALARS
    assert set(numbers("depth_to_max_blocks")) == {rules._MOST_CHUNKS}
    assert f"kChunkSize = {rules._CHUNK_ELEMENTS};" in HEADER.read_text()


def test_an_optimizer_over_many_tensors_is_as_many_launches_as_lists_need():
    def program(device, fused):
        parameters = [torch.nn.Parameter(torch.empty(1024, 1024, device=device)) for _ in range(600)]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        torch.optim.AdamW(parameters, fused=fused, foreach=not fused).step()

    sizes = [1024 * 1024] * 600
    fused = counted(lambda device: program(device, True))
    assert fused["_fused_adamw_"] == as_torch_fills_launches(sizes, 252, 2240, 65536) > 1
    in_lists = counted(lambda device: program(device, False))
    assert in_lists["_foreach_addcdiv_"] == as_torch_fills_launches(sizes, 336, 2240, 65536) > 1


def test_lists_of_several_types_go_one_by_one():
    some, others = [torch.zeros(5)] * 7, [torch.zeros(5, dtype=torch.bfloat16)] * 7
    assert rounded_up(launches_of(aten._foreach_add_.List, (some, some), {}, None)) == 1
    assert launches_of(aten._foreach_add_.List, (some, others), {}, None) == 7


def test_norms_of_a_list_take_zeros_and_a_second_kernel():
    tensors = [torch.zeros(5)] * 7
    assert rounded_up(launches_of(aten._foreach_norm.Scalar, (tensors,), {}, tensors)) == 4


# --- one operator, several kernels ------------------------------------------------------------------------------------


def attending(device, heads_of_keys, backend, dtype=torch.bfloat16):
    query = torch.empty(2, 8, 256, 64, device=device, dtype=dtype, requires_grad=True)
    key = torch.empty(2, heads_of_keys, 256, 64, device=device, dtype=dtype, requires_grad=True)
    with sdpa_kernel(backend):
        F.scaled_dot_product_attention(query, key, key, enable_gqa=heads_of_keys < 8).sum().backward()


@pytest.mark.parametrize(
    "backend,heads_of_keys,dtype,expected",
    [
        (SDPBackend.FLASH_ATTENTION, 8, torch.bfloat16, 3),
        (SDPBackend.FLASH_ATTENTION, 2, torch.bfloat16, 5),
        (SDPBackend.EFFICIENT_ATTENTION, 8, torch.bfloat16, 1),
        (SDPBackend.EFFICIENT_ATTENTION, 8, torch.float32, 4),
    ],
)
def test_attention_is_one_kernel_forward_and_several_backward(backend, heads_of_keys, dtype, expected):
    found = counted(lambda device: attending(device, heads_of_keys, backend, dtype))
    name = f"_scaled_dot_product_{backend.name.lower()}"
    assert (found[name], found[f"{name}_backward"]) == (1, expected)


@pytest.mark.parametrize("num_tokens,expected", [(3072, 2), (3073, 11 + 4 + 16)])
def test_a_gradient_of_many_tokens_is_sorted(num_tokens, expected):
    def program(device):
        weight = torch.empty(1000, 16, device=device, requires_grad=True)
        F.embedding(torch.zeros(num_tokens, dtype=torch.int64, device=device), weight).sum().backward()

    assert counted(program)["embedding_dense_backward"] == expected


def put(accumulate: bool, num_rows: int):
    target, rows = torch.zeros(1000, 4), torch.zeros(num_rows, dtype=torch.int64)
    call = (target, [rows], torch.zeros(num_rows, 4), accumulate)
    return launches_of(aten.index_put_.default, call, {}, target)


def test_rows_that_are_added_are_sorted_and_rows_that_are_written_are_not():
    assert put(accumulate=False, num_rows=5000) == 1
    assert put(accumulate=True, num_rows=5000) == 5 + 2 + 3 + 4 + 2 * 2, "two passes: 1000 rows are 10 bits"
    assert put(accumulate=True, num_rows=50) == 5 + 2 + 3 + 1, "one block sorts them"


@pytest.mark.parametrize(
    "call,expected",
    [
        (lambda x: torch.cat([x] * 128), 1),
        (lambda x: torch.cat([x] * 129), 2),
        (lambda x: torch.cat([x.t()] * 129), 3),
        (lambda x: torch.cat([x.view(2, 2, 2, 1, 4)] * 3), 3),
        (lambda x: torch.cat([x, x.half()]), 2),
        (lambda x: F.linear(x, x[:4, :4].clone(), x[0].clone()) - 1, 1),
        (lambda x: torch.addmm(x, x, x[:4].clone()), 2),
        (lambda x: torch.addmm(x, x, x[:4].clone(), out=x), 1),
        (lambda x: x.cumsum(0), 1),
        (lambda x: x.view(-1).cumsum(0), 2),
        (lambda x: F.pad(x, (0, 1)), 2),
    ],
)
def test_what_else_is_several_kernels(call, expected):
    found = counted(lambda device: call(torch.empty(8, 4, device=device)))
    names = found.keys() & {"cat", "addmm", "cumsum", "constant_pad_nd"}
    assert len(names) == 1
    assert found[names.pop()] == expected


def test_layer_norm_is_one_kernel_forward_and_two_backward():
    def program(device):
        values: Tensor = torch.empty(8, 16, device=device, requires_grad=True)
        weight = torch.empty(16, device=device, requires_grad=True)
        F.layer_norm(values, (16,), weight, weight).sum().backward()

    found = counted(program)
    assert (found["native_layer_norm"], found["native_layer_norm_backward"]) == (1, 2)


def test_the_clock_is_told():
    """A step that launches bind takes as long as they do, whatever operators they come from."""
    gpu = VirtualGPU("h100-80gb")
    with gpu:
        weight = torch.empty(1000, 16, device=gpu.device, requires_grad=True)
        tokens = torch.zeros(4000, dtype=torch.int64, device=gpu.device)
        F.embedding(tokens, weight).sum().backward()
    entries = gpu.recorder.work.entries
    assert sum(work.num_launches for work in entries) > len(entries) + 25
    with_all = Clock(entries).times_on(gpu.spec).between(0, len(entries)).seconds
    for work in entries:
        work.launches = 1
    assert with_all > 1.5 * Clock(entries).times_on(gpu.spec).between(0, len(entries)).seconds
