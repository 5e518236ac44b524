"""Kernels on a machine without Triton: they are imported with a stand-in, estimated, and not run."""

import importlib.util
import sys

import pytest
import torch

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.triton.triton_stand_in import importable

KERNELS = """
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime.autotuner import Autotuner

ZERO = tl.constexpr(0)
TYPES = {"float": tl.float32}

@triton.jit
def inverse(x):
    return libdevice.rsqrt(x) + ZERO

@triton.autotune([triton.Config({"BLOCK": 128}, num_warps=8), triton.Config({"BLOCK": 64})], key=["n"])
@triton.heuristics({"EVEN": lambda given: given["n"] % given["BLOCK"] == 0})
@triton.jit
def scale(x_ptr, out_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    at = tl.max_contiguous(tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), BLOCK)
    tl.store(out_ptr + at, inverse(tl.load(x_ptr + at)))

def launch(x, out):
    scale[lambda given: (triton.cdiv(given["n"], given["BLOCK"]),)](x, out, len(x))
"""


@pytest.fixture(name="kernels")
def _kernels(tmp_path):
    path = tmp_path / "kernels.py"
    path.write_text(KERNELS, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with importable():
        spec.loader.exec_module(module)
    return module


def test_a_library_of_kernels_is_traced_as_with_triton(kernels):
    with VirtualGPU("a100-80gb") as gpu:
        x, out = (torch.ones(1000, device="cuda") for _ in range(2))
        before, done = gpu.recorder.live_bytes, len(gpu.work.entries)
        for tuned_in_bytes in (256 * 2**20, 0):
            gpu.recorder.reset_peak()
            kernels.launch(x, out)
            assert gpu.recorder.peak_bytes - before == tuned_in_bytes
        assert [(entry.name, entry.num_bytes) for entry in gpu.work.entries[done:]] == 2 * [("scale", 8000)]


def test_a_kernel_is_not_run_without_triton(kernels):
    with pytest.raises(UserError, match="scale is a Triton kernel, and Triton is not installed here"):
        kernels.launch(torch.ones(8), torch.ones(8))


def test_only_what_is_imported_meanwhile_sees_the_stand_in(kernels):
    real = sys.modules.get("triton")
    assert kernels.triton is not real
    with importable():
        import triton  # pyright: ignore[reportMissingImports]

        assert triton is kernels.triton
    assert sys.modules.get("triton") is real
