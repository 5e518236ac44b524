"""What ends somebody's script, and the process that it runs in, is told in a sentence."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
from processes import LIMIT_SECONDS

PROGRAM = """
import os, signal, sys, time
from lowmem_ft.cli.console.exit_codes import explains_user_errors
from lowmem_ft.cli.processes.isolated_process import in_own_process
from lowmem_ft.foundation.errors import UserError

def work():
    {work}
    return 3

sys.exit(explains_user_errors(lambda argv: in_own_process(work, "train.py"))())
"""


def start(work, before=""):
    return subprocess.Popen(
        [sys.executable, "-c", before + PROGRAM.format(work=work)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize(
    "name, words",
    [
        ("SIGSEGV", "native code has crashed, in a library or in the script"),
        ("SIGABRT", "native code has crashed, in a library or in the script"),
        ("SIGKILL", "host memory has run out"),
    ],
)
def test_a_script_that_a_signal_ends_is_a_sentence(name, words):
    process = start(f"os.kill(os.getpid(), signal.{name})")
    output, errors = process.communicate()
    assert process.returncode == 1
    assert output == ""
    [line] = errors.splitlines()
    assert line.startswith(f"error: train.py was ended by {name} while it was estimated")
    assert words in line


@pytest.mark.parametrize(
    "work, code, words",
    [
        ("print('done')", 3, ""),
        ("raise UserError('a mistake')", 2, "error: a mistake\n"),
        ("sys.exit(7)", 7, ""),
    ],
)
def test_what_it_returns_or_says_is_returned_and_said_once(work, code, words):
    process = start(work)
    output, errors = process.communicate()
    assert (process.returncode, errors) == (code, words)
    assert output == ("done\n" if "print" in work else "")


SIGNALLED_AFTER_ITS_FORK = """
import os, signal, time
fork = os.fork

def fork_and_get_a_signal():
    child = fork()
    if child:
        while not os.path.exists({ready!r}):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
    return child

os.fork = fork_and_get_a_signal
"""


@pytest.mark.parametrize(
    "number, reaches",
    [
        *((number, reaches) for number in (signal.SIGINT, signal.SIGTERM) for reaches in ("both", "one")),
        (signal.SIGTERM, "the one that has just forked"),
    ],
)
def test_a_signal_to_the_command_ends_both_processes_tidily(number, reaches, tmp_path):
    ready, tidied = tmp_path / "ready", tmp_path / "tidied"
    process = start(
        f"try:\n        open({str(ready)!r}, 'w').close()\n        time.sleep(600)\n"
        f"    finally:\n        open({str(tidied)!r}, 'w').close()",
        before=SIGNALLED_AFTER_ITS_FORK.format(ready=str(ready)) if "fork" in reaches else "",
    )
    while not ready.exists():
        time.sleep(0.01)
    if "fork" not in reaches:
        (os.killpg if reaches == "both" else os.kill)(process.pid, number)
    try:
        _, errors = process.communicate(timeout=LIMIT_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 128 + number
    assert errors == f"Stopped by {number.name} before it was finished: nothing was written.\n"
    assert tidied.exists()
