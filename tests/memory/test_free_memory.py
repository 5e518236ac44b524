"""Freed memory goes back to the system where the C library can be told so."""

import ctypes
from types import SimpleNamespace

from lowmem_ft.memory.free_memory import return_free_memory


def test_the_c_library_is_told_to_keep_nothing(monkeypatch):
    kept = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(malloc_trim=kept.append))
    return_free_memory()
    assert kept == [0]


def test_one_that_cannot_is_left_alone(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    return_free_memory()
