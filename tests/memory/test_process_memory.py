"""Resident memory of the process, whatever it was before."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from lowmem_ft.memory import resident
from lowmem_ft.memory.resident import peak_resident_bytes, resident_bytes
from lowmem_ft.units import MIB

PROGRAM = """
import sys
from lowmem_ft.memory.resident import peak_resident_bytes
assert "torch" not in sys.modules
print(peak_resident_bytes())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a program's peak is its own")
def test_a_parent_s_memory_is_no_peak_of_ours():
    """Linux hands a program started from a notebook with a model in it that notebook's peak, by ``getrusage``."""
    large = torch.ones(300 * MIB // 4)
    answer = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert 0 < int(answer.stdout) < large.nbytes / 2


@pytest.mark.parametrize("status", ["", "Name:\tpython\nVmRSS:\t 300 kB\n"])
def test_a_system_that_tells_no_high_water_mark_has_another_counter(monkeypatch, tmp_path, status):
    file = tmp_path / "status"
    if status:
        file.write_text(status)
    monkeypatch.setattr(resident, "_STATUS", file)
    assert peak_resident_bytes() >= resident_bytes() - 50 * MIB > 0
