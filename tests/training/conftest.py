from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lowmem_ft.recipe import load_recipe


@pytest.fixture
def tiny(tmp_path):
    """The recipe `tiny` in a folder of its own, with overrides."""

    def load(*overrides, output_dir: Path | None = None):
        folder = output_dir or tmp_path / "run"
        return load_recipe("tiny", [f"training.output_dir={folder}", "training.use_cpu=true", *overrides])

    return load


@pytest.fixture
def metrics():
    """The step records of a run folder."""

    def read(folder: Path, key: str = "loss"):
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [record[key] for record in records if "loss" in record]

    return read


@pytest.fixture
def recipes_folder():
    """The recipes that come with the project."""
    return Path(__file__).parents[2] / "recipes"


@pytest.fixture
def in_two_processes():
    """Runs Python code in two interpreters that find each other as under a launcher; both must succeed.

    Not by forking this one: autograd's threads, and a virtual GPU that a test before has left in it, do not go along.
    """

    def run(code: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        processes = []
        for rank in ("0", "1"):
            places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", code],
                    env={**os.environ, **places, **address},
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        try:
            errors = [process.communicate(timeout=240)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert [process.returncode for process in processes] == [0, 0], errors

    return run
