"""What the C library keeps of freed memory."""

import ctypes
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

from lowmem_ft.system.malloc import KERNELS_KEPT, keep_few_kernels, return_free_memory

PROGRAM = textwrap.dedent("""
    import ctypes
    import torch
    from lowmem_ft.system.malloc import keep_tensors_out_of_the_heap
    from lowmem_ft.foundation.units import MIB

    class Counts(ctypes.Structure):  # mallinfo(3)
        _fields_ = [(name, ctypes.c_size_t) for name in "arena b c d mapped f g h i j".split()]

    def heap_bytes():
        return mallinfo2().arena

    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Counts
    if {keeps_out}:
        print(keep_tensors_out_of_the_heap())
    torch.ones(8 * MIB, dtype=torch.uint8)  # freed: from now on glibc has room for such blocks in its heap
    before = heap_bytes()
    tensors = [torch.ones(5 * MIB, dtype=torch.uint8) for _ in range(13)]
    last = torch.ones(5 * MIB, dtype=torch.uint8)
    del tensors
    print((heap_bytes() - before) // MIB)
""")


def run(*, keeps_out, **environment):
    program = PROGRAM.format(keeps_out=keeps_out)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout.split()


counts_its_heap = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33, which counts its heap"
)


@counts_its_heap
def test_freed_tensors_leave_no_gaps_in_the_heap():
    (kept,) = run(keeps_out=False)
    done, left = run(keeps_out=True)
    assert done == "True"
    assert int(left) < 8 < 60 < int(kept)  # MiB, of 65


@counts_its_heap
@pytest.mark.parametrize(
    "setting",
    [{"MALLOC_MMAP_THRESHOLD_": "1048576"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1048576"}],
    ids=lambda setting: next(iter(setting)),
)
def test_a_setting_of_the_users_own_stays(setting):
    done, _ = run(keeps_out=True, **setting)
    assert done == "False"


def test_kernels_are_forgotten_unless_the_user_says_how_many_stay(monkeypatch):
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    monkeypatch.setattr(os, "environ", dict(os.environ))  # of which the libraries of this process see nothing
    keep_few_kernels()
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == str(KERNELS_KEPT)
    assert os.environ["LRU_CACHE_CAPACITY"] == "7"


def test_the_c_library_is_told_to_keep_nothing(monkeypatch):
    kept = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(malloc_trim=kept.append))
    return_free_memory()
    assert kept == [0]


def test_one_that_cannot_is_left_alone(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    return_free_memory()
