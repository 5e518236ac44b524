"""Ctrl-C while a program is still importing its own modules is a line, whichever of them it meets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from processes import LIMIT_SECONDS, set_launch

FINETUNE = Path(__file__).parents[2] / "scripts" / "finetune.py"

HARNESS = """
import os, runpy, signal, sys

class StopsAtImport:
    def __init__(self, number):
        self.left = number

    def find_spec(self, name, path=None, target=None):
        if name.startswith("lowmem_ft.") and name not in BEFORE_ANYTHING_CAN_BE_DONE:
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGINT)

def code_if_stopped_at(number):
    child = os.fork()
    if child == 0:
        sys.meta_path.insert(0, StopsAtImport(number))
        exec(PROGRAM, {{"__name__": "harness"}})
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

BEFORE_ANYTHING_CAN_BE_DONE = (
    "lowmem_ft.__main__", "lowmem_ft.foundation", "lowmem_ft.foundation.lazy_exports", "lowmem_ft.foundation.system",
    "lowmem_ft.foundation.system.signals", "lowmem_ft.foundation.system.launch_variables",
)
PROGRAM = {program!r}
sys.argv = ["lowmem-ft", "--help"]
codes = []
while not codes or codes[-1] == 130:
    codes.append(code_if_stopped_at(len(codes) + 1))
print(*codes)
"""

PROGRAMS = {
    "as a module": 'runpy.run_module("lowmem_ft", run_name="__main__", alter_sys=True)',
    "as installed": "from lowmem_ft.__main__ import main; sys.exit(main())",
    "as a script": f'runpy.run_path({str(FINETUNE)!r}, run_name="__main__")',
}
"""The second is what pip writes into ``lowmem-ft``."""


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_each_import_may_be_the_one_that_ctrl_c_meets(program):
    code = HARNESS.format(program="import os, runpy, sys\n" + program)
    done = _run(code)
    *stopped, ended = done.stdout.splitlines()[-1].split()
    assert len(stopped) >= 8
    assert ended == "0"
    assert done.stderr.splitlines() == [
        ("Stopped by SIGINT before it was finished: nothing was written.")
    ] * len(stopped)


def test_only_the_main_process_of_a_launch_tells_it(monkeypatch):
    set_launch(monkeypatch, rank=1)
    code = HARNESS.format(program="import sys\n" + PROGRAMS["as installed"])
    done = _run(code)
    assert set(done.stdout.splitlines()[-1].split()) == {"130", "0"}
    assert done.stderr == ""


def test_a_signal_that_is_ignored_stays_so():
    """As in the background of a shell without job control."""
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    code += HARNESS.format(program="import sys\n" + PROGRAMS["as installed"])
    done = _run(code)
    assert done.stdout.splitlines()[-1] == "0"


def test_once_a_command_runs_it_says_what_it_leaves():
    code = """
from lowmem_ft.__main__ import main
import lowmem_ft.recipe.request.request, signal, sys
lowmem_ft.recipe.request.request.load_recipe = lambda *settings: signal.raise_signal(signal.SIGINT)
sys.exit(main(["train", "recipe=tiny"]))
"""
    done = _run(code)
    assert done.returncode == 130
    assert (
        done.stderr
        == "Stopped by SIGINT before the first step: nothing was trained, and nothing was written.\n"
    )


def _run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_SECONDS)
