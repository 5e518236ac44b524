"""A child process answers, tells how far it is, and ends however one of the two processes does."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import psutil
import pytest
from processes import LIMIT_SECONDS

from lowmem_ft.foundation.system.child_process import ChildFailedError, ChildProcess, _environment

PROGRAM = """
import os, sys, time
from lowmem_ft.foundation.system.child_process import ChildProcess

process = ChildProcess(imports="json", warnings_of="somebodys")
print(process.call(os.getpid), flush=True)
time.sleep(600)
"""


@pytest.fixture
def process():
    with ChildProcess(imports="json", warnings_of="somebodys") as process:
        yield process


def test_functions_of_this_process_are_called_by_their_names(process):
    told = []
    text = json.dumps({"a": {"b": 1}, "c": 2})
    answer = process.call(json.loads, text, object_hook=lambda *values: told.append(values))
    assert told == [({"b": 1},), ({"a": None, "c": 2},)]
    assert answer is None, "what they return stays here"
    assert process.call(json.loads, text) == {"a": {"b": 1}, "c": 2}


def test_an_error_of_such_a_function_is_raised_here(process):
    def stop(values):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        process.call(json.loads, "{}", object_hook=stop)


@pytest.mark.parametrize(
    "function, argument, words",
    [(os._exit, 7, "exit code 7$"), (json.loads, "{", "exit code 1: json.decoder.JSONDecodeError: ")],
)
def test_a_process_that_dies_is_told_of(process, function, argument, words):
    for _ in range(2):
        with pytest.raises(ChildFailedError, match=words):
            process.call(function, argument)


def test_it_ends_with_its_parent():
    parent = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    child.wait(LIMIT_SECONDS)


def test_it_takes_itself_for_no_part_of_a_launch_and_sees_no_gpu():
    own = {"RANK": "1", "WORLD_SIZE": "2", "PYTHONPATH": "mine", "HF_HOME": "there"}
    expected = {"PYTHONPATH": "mine", "HF_HOME": "there", "CUDA_VISIBLE_DEVICES": ""}
    assert _environment(own) == expected
