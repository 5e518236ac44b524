"""Commands whose output nobody takes: a full disk is one line, a closed pipe or stream is silence."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest
from processes import LIMIT_SECONDS

COMMANDS = (
    "gpus --json",
    "recipes tiny",
    "--version",
    "estimate --help",
)


def shell(command: str, pass_fds: Sequence[int] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    """In bash, with ``$RUN`` for the program."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        pass_fds=pass_fds,
        env={**variables, "RUN": f"{sys.executable} -m lowmem_ft", **environment},
    )


FULL = "error: The output cannot be written: No space left on device. Write it to a disk that has room.\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk_is_one_line(command):
    done = shell(f"$RUN {command} > /dev/full")
    assert (done.returncode, done.stderr) == (2, FULL)


@pytest.mark.parametrize("command", ["gpus", "recipes tiny", "plan --help"])
def test_a_full_disk_is_one_line_where_nothing_waits_to_be_written(command):
    done = shell(f"$RUN {command} > /dev/full", PYTHONUNBUFFERED="1")
    assert (done.returncode, done.stderr) == (2, FULL)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_closed_stdout_takes_everything(command):
    done = shell(f"$RUN {command} >&-")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_pipe_that_nobody_reads_ends_a_command_in_silence(command):
    reader, writer = os.pipe()
    os.close(reader)
    done = shell(f"$RUN {command} >&{writer}", pass_fds=(writer,))
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize(
    "streams", ["2>&-", "2>/dev/full", ">&- 2>&-", "<&- >&- 2>&-", ">/dev/full 2>/dev/full"]
)
def test_an_error_that_cannot_be_said_keeps_its_exit_code(streams):
    assert shell(f"$RUN gpus nothing {streams}").returncode == 2
