"""What the process holds of the host's memory, whatever it was before and whatever files it has looked at."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from lowmem_ft.memory import process_memory
from lowmem_ft.memory.process_memory import (
    held_bytes,
    peak_held_bytes,
    reset_peak,
    resident_file_bytes,
)
from lowmem_ft.units import MIB

PROGRAM = """
import sys
from lowmem_ft.memory.process_memory import peak_held_bytes
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
    monkeypatch.setattr(process_memory, "_STATUS", file)
    assert peak_held_bytes() >= held_bytes() - 50 * MIB > 0


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere pages of files are not told apart")
def test_pages_of_files_are_not_held(disk_folder):
    """How many of the libraries' are resident is the system's choice: 133 MiB more in the same run, once."""
    file = disk_folder / "weights"
    with file.open("wb") as stream:
        stream.writelines(bytes(MIB) for _ in range(64))
    reset_peak()
    held, peak, in_files = held_bytes(), peak_held_bytes(), resident_file_bytes()
    values = torch.from_file(str(file), size=64 * MIB, dtype=torch.uint8)
    assert not values.any()
    assert resident_file_bytes() - in_files > 60 * MIB
    assert abs(held_bytes() - held) < 20 * MIB
    assert abs(peak_held_bytes() - peak) < 20 * MIB
    values += 1  # pages of its own, where the file's were
    assert held_bytes() - held > 60 * MIB
