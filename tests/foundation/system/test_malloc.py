"""What the C library keeps of freed memory."""

import ctypes
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

from lowmem_ft.foundation.system import malloc
from lowmem_ft.foundation.system.malloc import (
    KERNELS_KEPT,
    LARGEST_IN_HEAP_BYTES,
    keep_few_kernels,
    keep_tensors_out_of_the_heap,
    return_free_memory,
)

PROGRAM = textwrap.dedent("""
    import ctypes
    import os
    import torch
    from lowmem_ft.foundation.system.malloc import keep_tensors_out_of_the_heap
    from lowmem_ft.foundation.units import MIB

    class Counts(ctypes.Structure):  # mallinfo(3)
        _fields_ = [(name, ctypes.c_size_t) for name in "arena b c d mapped f g h i j".split()]

    def heap_bytes():
        return mallinfo2().arena

    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Counts

    def kept_mib():
        torch.ones(8 * MIB, dtype=torch.uint8)  # freed: from now on glibc has room for such blocks in its heap
        before = heap_bytes()
        tensors = [torch.ones(5 * MIB, dtype=torch.uint8) for _ in range(13)]
        last = torch.ones(5 * MIB, dtype=torch.uint8)
        del tensors
        return (heap_bytes() - before) // MIB

    child = os.fork()  # of the same heap, without the setting
    if child == 0:
        print(kept_mib(), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    print(keep_tensors_out_of_the_heap(), kept_mib())
""")


def run(**environment):
    """MiB that stay in the heap as glibc has it; whether tensors are kept out of it, and what stays then."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
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
    kept, done, left = run()
    assert done == "True"
    assert int(left) < 8 < 60 < int(kept)  # MiB, of 65


@pytest.mark.parametrize(
    "name, value",
    [("MALLOC_MMAP_THRESHOLD_", "1048576"), ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=1048576")],
)
def test_a_setting_of_the_users_own_stays(name, value, monkeypatch):
    told = []
    for variable in ("MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(malloc, "_function", lambda name: lambda *option: told.append(option) or 1)
    assert keep_tensors_out_of_the_heap()
    monkeypatch.setenv(name, value)
    assert not keep_tensors_out_of_the_heap()
    assert told == [(-3, LARGEST_IN_HEAP_BYTES)]


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
