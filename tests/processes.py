"""Programs in processes of their own, without the seconds that importing takes: forks of one fresh interpreter.

Not forks of the tests' own process: autograd's threads, and what a virtual GPU has left in it, do not go along.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess

import pytest

LIMIT_SECONDS = 1800
"""Ends what hangs, not what waits for a busy machine: these programs take seconds."""


def launch_variables(rank: int, num_processes: int = 2, port: int = 29500) -> dict[str, str]:
    """Return what a launcher sets for one of several processes on this machine."""
    return {
        "RANK": f"{rank}",
        "LOCAL_RANK": f"{rank}",
        "WORLD_SIZE": f"{num_processes}",
        "LOCAL_WORLD_SIZE": f"{num_processes}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{port}",
    }


def set_launch(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Make this process one of two of a launch."""
    for name, value in launch_variables(rank).items():
        monkeypatch.setenv(name, value)


FORKING = """
import atexit, gc, json, os, signal, sys, traceback
gc.disable()  # nothing of what is imported goes away
import accelerate, datasets, torch, transformers
import lowmem_ft.cli.answers.train, lowmem_ft.cli.commands.train, lowmem_ft.planning.estimator
import lowmem_ft.planning.preflight.train, lowmem_ft.recipe, lowmem_ft.reports.run_report
import lowmem_ft.training.run.loop, torch.distributed.fsdp
from transformers.models.llama import modeling_llama

def become(job, rank):
    os.chdir(job["folder"])
    os.environ.update(job["environments"][rank])
    for descriptor, place in enumerate((os.devnull, f"{job['output']}/{rank}.out", f"{job['output']}/{rank}.err")):
        os.dup2(os.open(place, os.O_RDWR | os.O_CREAT), descriptor)
    sys.argv = ["program", *job["arguments"]]
    signal.alarm(job["limit_seconds"])

def exit_code(source):
    try:
        exec(compile(source, "program", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

def run(source):
    code = exit_code(source)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # taking every module down takes seconds

lowmem_ft.recipe.load_recipe("tiny")  # what the first recipe imports and keeps
gc.freeze()  # or each collection in a child would copy all that was imported
gc.enable()
for line in sys.stdin:
    job, children = json.loads(line), []
    for rank in range(len(job["environments"])):
        child = os.fork()
        if child == 0:
            become(job, rank)
            run(job["source"])
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(json.dumps(codes), flush=True)
"""


class Forks:
    """An interpreter with everything imported, which has run nothing; it starts with the first program.

    Args:
        packages: a folder whose packages are imported instead of this checkout's; None: none are.
    """

    def __init__(self, packages: Path | None = None) -> None:
        self._packages = packages
        self._interpreter: subprocess.Popen[str] | None = None

    def run(self, source: str, *arguments: str, folder: Path | None = None) -> CompletedProcess[str]:
        """Run Python code to its end.

        Args:
            source: the program; it ends as a script does, by ``sys.exit`` or an error, too.
            arguments: ``sys.argv[1:]``.
            folder: where it runs; None: where the tests do.
        """
        [done] = self._run(source, arguments, [{}], folder or Path.cwd())
        return done

    def run_two(self, source: str, *arguments: str) -> list[CompletedProcess[str]]:
        """Run Python code in two processes that find each other as under a launcher, which ends neither of them."""
        return self.run_several(2, source, *arguments)

    def run_several(
        self, num_processes: int, source: str, *arguments: str, variables: Mapping[str, str] | None = None
    ) -> list[CompletedProcess[str]]:
        """The same in so many, with further variables."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        places = [
            {**(variables or {}), **launch_variables(rank, num_processes, port)}
            for rank in range(num_processes)
        ]
        return self._run(source, arguments, places, Path.cwd())

    def close(self) -> None:
        """End the interpreter."""
        if self._interpreter is not None:
            self._interpreter.communicate()

    def _run(
        self, source: str, arguments: tuple[str, ...], environments: list[Mapping[str, str]], folder: Path
    ) -> list[CompletedProcess[str]]:
        with tempfile.TemporaryDirectory() as output:
            job = {
                "source": source,
                "arguments": arguments,
                "environments": environments,
                "folder": str(folder),
                "output": output,
                "limit_seconds": LIMIT_SECONDS,
            }
            codes = self._ask(json.dumps(job))
            return [
                CompletedProcess(
                    [source, *arguments],
                    code,
                    stdout=Path(output, f"{rank}.out").read_text(),
                    stderr=Path(output, f"{rank}.err").read_text(),
                )
                for rank, code in enumerate(codes)
            ]

    def _ask(self, job: str) -> list[int]:
        if self._interpreter is None:
            before = [] if self._packages is None else [f"{self._packages}"]
            python_path = os.pathsep.join([*before, *filter(None, [os.environ.get("PYTHONPATH")])])
            self._interpreter = subprocess.Popen(
                [sys.executable, "-c", FORKING],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path},
                cwd=self._packages,  # which Python looks into before
            )
        assert self._interpreter.stdin is not None
        assert self._interpreter.stdout is not None
        self._interpreter.stdin.write(job + "\n")
        self._interpreter.stdin.flush()
        return json.loads(self._interpreter.stdout.readline())


TRAIN = "import sys; from lowmem_ft.cli.commands.train import main; sys.exit(main())"
"""The command `lowmem-ft train`, as a program."""


def train_in_processes(forks, num_processes: int, strategy: str, *settings: str) -> str:
    """Train in one process, or in several by a strategy; return what they print to stderr."""
    if num_processes > 1:
        done = forks.run_several(num_processes, TRAIN, *settings, f"distributed.strategy={strategy}")
    else:
        done = [forks.run(TRAIN, *settings)]
    said = "".join(process.stderr for process in done)
    assert [process.returncode for process in done] == [0] * num_processes, said
    return said
