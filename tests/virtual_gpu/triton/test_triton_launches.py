"""Launches of a program's own Triton kernels on a virtual GPU: nothing is compiled, and each is seen once."""

import pytest
import torch

from lowmem_ft.foundation.memory.race import RaceError
from lowmem_ft.virtual_gpu.gpu import VirtualGPU

triton = pytest.importorskip("triton", reason="there is no Triton for this system")
tl = pytest.importorskip("triton.language")

N, BLOCKS = 1000, (128, 64)


@triton.jit
def add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x_ptr + at, mask=at < n) + tl.load(y_ptr + at, mask=at < n)
    tl.store(out_ptr + at, value, mask=at < n)


@triton.autotune(configs=[triton.Config({"BLOCK": block}) for block in BLOCKS], key=["n"])
@triton.heuristics({"EVEN": lambda given: given["n"] % given["BLOCK"] == 0})
@triton.jit
def scale(x_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, 2 * tl.load(x_ptr + at, mask=at < n), mask=at < n)


def tensors(number):
    return [torch.ones(N, device="cuda") for _ in range(number)]


def grid_of(given):
    return (triton.cdiv(given["n"], given["BLOCK"]),)


def test_a_launch_is_one_kernel_that_reads_and_writes_its_tensors_and_allocates_nothing():
    with VirtualGPU("a100-80gb") as gpu:
        x, y, out = tensors(3)
        before, done = gpu.recorder.live_bytes, len(gpu.work.entries)
        add[grid_of](x, y, out, N, BLOCK=128, num_warps=8)
        add[(0,)](x, y, out, n=N, BLOCK=128)  # an empty grid launches nothing
        (entry,) = gpu.work.entries[done:]
        assert gpu.recorder.live_bytes == before
    assert (entry.kind, entry.name, entry.num_bytes, entry.launches) == ("kernel", "add", 3 * 4 * N, 1)
    assert (entry.by_triton, entry.python_operators) == (True, 0)


def test_an_autotuner_chooses_without_timing_takes_its_buffer_once_and_forgets_the_choice():
    with VirtualGPU("a100-80gb") as gpu:
        (x,) = tensors(1)
        for buffer_bytes in (256 * 2**20, 0):
            gpu.recorder.reset_peak()
            before, done = gpu.recorder.live_bytes, len(gpu.work.entries)
            scale[grid_of](x, N)
            (entry,) = gpu.work.entries[done:]
            assert (entry.name, entry.num_bytes) == ("scale", 2 * 4 * N)
            assert gpu.recorder.peak_bytes - before == buffer_bytes
        assert scale.best_config.kwargs == {"BLOCK": BLOCKS[0]}
    assert not scale.cache


def test_what_libraries_ask_of_the_device_is_answered_for_the_gpu():
    with VirtualGPU("h100-80gb"):
        driver = triton.runtime.driver.active
        target = driver.get_current_target()
        assert (target.backend, target.arch) == ("cuda", 90)
        assert driver.utils.get_device_properties(0) | {"max_num_regs": 0} == {
            "max_shared_mem": 227 * 1024,
            "multiprocessor_count": 132,
            "max_num_regs": 0,
            "warpSize": 32,
        }


def test_a_tensor_of_the_host_is_refused_as_triton_refuses_it():
    with VirtualGPU("a100-80gb"):
        x, y = tensors(2)
        with pytest.raises(ValueError, match=r"Pointer argument \(at 2\) cannot be accessed from Triton"):
            add[(8,)](x, y, torch.empty(N), N, BLOCK=128)


def test_autograd_sees_nothing_of_a_launch():
    with VirtualGPU("a100-80gb"):
        x, y, out = tensors(3)
        x.requires_grad_()
        square = x * x
        version = x._version
        add[(8,)](y, y, x, N, BLOCK=128)
        add[(8,)](x, y, out, N, BLOCK=128)
        assert not out.requires_grad
        assert x._version == version
        square.sum().backward()


def run_on_two_streams(write, read):
    with VirtualGPU("a100-80gb", check_streams=True):
        x, y, out = tensors(3)
        other = torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        write(x, y, out)
        with torch.cuda.stream(other):
            read(x, y, out)
        torch.cuda.synchronize()


def test_races_between_streams_are_found_by_what_the_kernels_write():
    run_on_two_streams(
        lambda x, y, out: add[(8,)](x, y, out, N, BLOCK=128),
        lambda x, y, out: add[(8,)](x, y, torch.empty_like(x), N, BLOCK=128),
    )
    with pytest.raises(RaceError, match="add"):
        run_on_two_streams(
            lambda x, y, out: add[(8,)](x, y, out, N, BLOCK=128),
            lambda x, y, out: add[(8,)](x, out, torch.empty_like(x), N, BLOCK=128),
        )


def test_triton_is_as_before_behind_the_block():
    from triton.runtime.jit import JITFunction

    before = JITFunction.run
    with VirtualGPU("a100-80gb"):
        assert JITFunction.run is not before
    assert JITFunction.run is before
