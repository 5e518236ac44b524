"""One process of a run that shares its model is killed at random moments; ``scripts/kill_processes.py`` goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
KILL = (
    f"import sys; sys.path[:0] = [{str(SCRIPTS)!r}]; import kill_processes; sys.exit(kill_processes.main())"
)


@pytest.mark.slow
def test_runs_whose_processes_are_killed_go_on_bit_for_bit(forks, tmp_path):
    done = forks.run(KILL, "--kills", "4", "--seed", "7", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 kills" in done.stdout
    assert "0 problems" in done.stdout
