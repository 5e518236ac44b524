"""What the process holds of the host's memory, whatever it was before and whatever files it has looked at."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from lowmem_ft.foundation.system import host_memory
from lowmem_ft.foundation.system.host_memory import (
    held_bytes,
    peak_held_bytes,
    reset_peak,
    resident_file_bytes,
)
from lowmem_ft.foundation.units import MIB

PROGRAM = """
import sys
from lowmem_ft.foundation.system.host_memory import peak_held_bytes
assert "torch" not in sys.modules
print(peak_held_bytes())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a program's peak is its own")
def test_a_parent_s_memory_is_no_peak_of_ours():
    """Linux hands a program started from a notebook with a model in it that notebook's peak, by ``getrusage``."""
    large = torch.ones(300 * MIB // 4)
    answer = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert 0 < int(answer.stdout) < large.nbytes / 2


@pytest.mark.parametrize("status", ["", "Name:\tpython\nVmSize:\t 300 kB\n"])
def test_a_system_that_tells_no_high_water_mark_has_another_counter(monkeypatch, tmp_path, status):
    file = tmp_path / "status"
    if status:
        file.write_text(status)
    monkeypatch.setattr(host_memory, "_STATUS", file)
    monkeypatch.setattr(host_memory, "_of_getrusage", lambda: 3 * 2**40)
    assert peak_held_bytes() == 3 * 2**40
    assert 0 < held_bytes() < 3 * 2**40


def test_it_counts_in_bytes_on_every_system():
    """More than a Python with torch in it could be if it were KiB, and less than any machine has if they were KiB."""
    assert 10 * MIB < host_memory._of_getrusage() < 2**50


def test_pages_of_files_are_not_held(linux_process):
    """How many of the libraries' are resident is the system's choice: 133 MiB more in the same run, once."""
    linux_process.becomes(of_files=114 * MIB)
    assert resident_file_bytes() == 114 * MIB
    assert held_bytes() == peak_held_bytes() == 100 * MIB
    linux_process.becomes(held=164 * MIB, of_files=50 * MIB)  # pages of its own, where the file's were
    assert held_bytes() == peak_held_bytes() == 164 * MIB


def test_the_peak_is_what_was_held_before_it_was_let_go(linux_process):
    linux_process.becomes(held=164 * MIB)
    linux_process.becomes(held=120 * MIB)
    assert (held_bytes(), peak_held_bytes()) == (120 * MIB, 164 * MIB)
    assert reset_peak()
    assert peak_held_bytes() == 120 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere they have another name, or none")
def test_linux_tells_what_is_asked_of_it():
    assert {"VmHWM", "VmRSS", "RssFile"} <= host_memory._status().keys()
