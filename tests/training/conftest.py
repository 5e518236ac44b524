from __future__ import annotations

import json
import multiprocessing
import os
import socket
import traceback
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState

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
    """Calls a function in two copies of this process, which find each other as under a launcher; both must return."""

    def call(function):
        context = multiprocessing.get_context("fork")  # a new interpreter would import everything anew
        errors = context.Queue()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        processes = [
            context.Process(target=_called_as, args=(rank, port, function, errors)) for rank in range(2)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=120)
        alive = [process for process in processes if process.is_alive()]
        for process in alive:
            process.kill()
        assert not alive, "they wait for each other"
        assert [process.exitcode for process in processes] == [0, 0], errors.get()

    return call


def _called_as(rank, port, function, errors):
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    places = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ.update(address | places)
    torch.set_num_threads(1)
    try:
        PartialState._reset_state()
        AcceleratorState._reset_state()
        function()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    except BaseException:
        errors.put(traceback.format_exc())
        raise
