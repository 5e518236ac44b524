"""The Triton kernel compiled for three generations of GPUs, without any of them."""

import json
import os
import subprocess
import sys

import pytest
from triton_kernel import AVERAGES, MASTERS, STATES

pytest.importorskip("triton", reason="there is no Triton for this system")

PROGRAM = """
import json, sys, triton_kernel
print(json.dumps([vars(triton_kernel.compiled(*job)) for job in json.loads(sys.argv[1])]))
"""


def compiled(jobs, folder):
    """In a process where Triton's interpreter is off, and which finds modules where this one does."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(folder),
    }
    command = [sys.executable, "-c", PROGRAM, json.dumps(jobs)]
    child = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


def check(jobs, folder):
    for job, found in zip(jobs, compiled(jobs, folder), strict=True):
        assert found["spilled_bytes"] == 0, job
        assert found["registers"] <= 128, job  # four blocks of 128 threads and more on a multiprocessor
        assert found["fused"] == 0, job
        assert found["least_bytes"] <= found["moved_bytes"] <= 1.2 * found["least_bytes"], job


def test_adamw_with_the_compact_formats(tmp_path):
    check([(arch, "adamw", "split24", "8bit") for arch in (80, 89, 90)], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 89, 90])
def test_every_rule_and_format(arch, tmp_path):
    check(
        [(arch, rule, master, state) for rule in AVERAGES for master in MASTERS for state in STATES], tmp_path
    )
