"""Processes that a script starts print nothing here, and only the first makes an estimate."""

from __future__ import annotations

import pytest

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.planning.script_runs import estimate_script

TRAINS = """
import torch

def train():
    model = torch.nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        model(torch.randn(2, 8, device="cuda")).sum().backward()
        optimizer.step()
"""
LOUD = "'import sys; print(1); print(2, file=sys.stderr)'"

QUIET = {
    "run": f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {LOUD}], check=True)",
    "output": (
        f"import subprocess, sys\ndone = subprocess.run([sys.executable, '-c', {LOUD}], stdout=-1, stderr=-1)\n"
        "assert done.stdout == b'1\\n' and done.stderr == b'2\\n'"
    ),
    "system": "import os\nassert os.system('echo 1; echo 2 >&2; exit 3') >> 8 == 3",
    "fork": "import os\nos.fork() or print(1)",
    "spawn": (
        "import multiprocessing\n"
        "if __name__ == '__main__':\n"
        "    process = multiprocessing.get_context('spawn').Process(target=print, args=(1,))\n"
        "    process.start()\n"
        "    process.join()"
    ),
}


@pytest.mark.parametrize("text", QUIET.values(), ids=QUIET)
def test_a_process_that_a_script_starts_prints_nothing_and_returns_nowhere(script, capfd, tmp_path, text):
    answers = tmp_path / "answers"
    found = estimate_script(script(f"{TRAINS}\n{text}\nif __name__ == '__main__':\n    train()\n"), gpu="t4")
    with answers.open("a") as file:
        file.write("one\n")
    assert found.steps == 3
    assert capfd.readouterr() == ("", "")
    assert answers.read_text() == "one\n"


def test_a_script_that_trains_in_a_process_of_its_own_ends_in_a_line(script, capfd):
    text = (
        f"import multiprocessing\n{TRAINS}\nif __name__ == '__main__':\n"
        "    process = multiprocessing.get_context('spawn').Process(target=train)\n"
        "    process.start()\n    process.join()\n"
    )
    with pytest.raises(
        UserError, match=r"steps in other processes are not seen, and it starts one at train.py:\d+"
    ):
        estimate_script(script(text), gpu="t4")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "code, words", [(5, r"exited by sys.exit\(5\)"), (0, "ended without an optimizer step")]
)
def test_a_script_that_ends_its_process_ends_in_a_line(script, code, words):
    with pytest.raises(UserError, match=words):
        estimate_script(script(f"import os\nos._exit({code})\n"), gpu="t4")


def test_a_process_that_a_library_starts_for_itself_is_not_called_the_scripts(script):
    with pytest.raises(UserError, match=r"steps in other processes are not seen\.$"):
        estimate_script(script("import ctypes.util\n\nctypes.util.find_library('c')\n"), gpu="t4")


def test_a_missing_file_is_shown_without_what_stands_for_open(script):
    with pytest.raises(UserError, match="No such file or directory: '/no/such/file'") as caught:
        estimate_script(script("open('/no/such/file')\n"), gpu="t4")
    shown = caught.value.own_traceback  # type: ignore[attr-defined]
    assert shown.startswith("The frames of its own code:\n")
    assert "temporary_files" not in shown
