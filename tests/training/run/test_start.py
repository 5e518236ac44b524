"""Idle cores are told with the way out of whoever launched the run."""

from __future__ import annotations

import os

import pytest
import torch

from lowmem_ft.training.run.start import _warn_of_idle_cores


@pytest.fixture(autouse=True)
def _machine(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(os, "getloadavg", lambda: (1.2, 1.0, 1.0), raising=False)
    for name in ("OMP_NUM_THREADS", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)


def test_nobody_is_told_where_nobody_has_limited_the_threads(caplog):
    _warn_of_idle_cores(1)
    assert caplog.messages == []


def test_without_a_launcher_its_flag_is_not_named(monkeypatch, caplog):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    _warn_of_idle_cores(2)
    assert caplog.messages == [
        "Using 2 of 8 cores, because OMP_NUM_THREADS=1. To use all, set OMP_NUM_THREADS=4."
    ]


def test_under_accelerate_its_flag_is_named(monkeypatch, caplog):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    _warn_of_idle_cores(2)
    assert caplog.messages[0].endswith(
        "To use all, add --num_cpu_threads_per_process=4 to accelerate launch."
    )
    caplog.clear()
    _warn_of_idle_cores(8)
    assert caplog.messages == []


def test_cores_that_others_use_are_not_idle(monkeypatch, caplog):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(os, "getloadavg", lambda: (7.8, 7.0, 7.0), raising=False)
    _warn_of_idle_cores(1)
    assert caplog.messages == []
