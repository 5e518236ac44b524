"""Processor seconds that answers take: whole commands in fresh processes, with nothing kept from before.

    python scripts/bench estimator [--only full all ...] [--times 3] [--against REVISION]
    python scripts/bench estimator --preflight 8b-24gb=rtx-4090 8b-bf16=h100-80gb ...

A command's seconds are those of all its processes, user and system, the median of several runs; the clock on the wall
depends on what else the machine does. ``beyond_imports`` leaves out what the imports of torch, transformers, accelerate
and a model class take by themselves. A plan's ``first_output`` are the seconds that have passed, likewise of all its
processes, when it prints its first line: its first answer, if it has one before the last.

With ``--against``: the same commands of another revision, in a git worktree of its own, in turns with those of this
one: seconds of two runs at different times cannot be compared on a machine that others use.

With ``--preflight``: the time that the estimate before a run adds to the start of ``lowmem-ft train``: from the start
of the other process to its answer, and from the question to the answer if imports are over before the run's data is
there; first and from kept traces.

Architectures come from the catalogue: no weights, no data, no network.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from command_line import answer_of_new_process, parser_of
from measured_on import measured_on

REPOSITORY = Path(__file__).resolve().parents[2]
IMPORTS = "imports"
_PROGRAM_OF_IMPORTS = "import torch, transformers, accelerate; from transformers import LlamaForCausalLM"

COMMANDS = {
    "full": "estimate recipe=8b-bf16 --gpu h100-80gb",
    "lora": "estimate recipe=7b-lora --gpu rtx-4090",
    "bare": "estimate model=llama-3.1-8b --gpu rtx-4090",
    "all": "estimate model=qwen3-14b --gpu all",
    # Two models of 32 layers by the same recipe.
    "hybrid": "estimate recipe=qwen3.5-9b-qlora --gpu rtx-4090",
    "dense": "estimate recipe=qwen3.5-9b-qlora model=llama-3.1-8b --gpu rtx-4090",
    "plan": "plan model=qwen3-8b adapter.name=lora --gpu rtx-4090 budget.host=64GiB",
}
"""Commands of ``lowmem-ft`` by a short name."""

_DOES_NOT_FIT = 3
"""An exit code that is an answer, too."""


def main() -> None:
    """Measure the commands and print one JSON object."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=[IMPORTS, *COMMANDS], help="some of the commands")
    parser.add_argument(
        "--times", type=int, default=3, help="runs of each command, of which the median counts"
    )
    parser.add_argument(
        "--against", metavar="REVISION", help="compare with another revision of this repository"
    )
    parser.add_argument("--preflight", nargs="+", metavar="NAME=GPU", help="shipped recipes, each on a GPU")
    parser.add_argument("--in-this-process", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.in_this_process:
        print(json.dumps(time_preflight(*arguments.in_this_process)))
        return
    if arguments.preflight:
        pairs = [named.rpartition("=") for named in arguments.preflight]
        rows = [answer_of_new_process(__file__, ["--in-this-process", name, gpu]) for name, _, gpu in pairs]
        print(json.dumps({**measured_on("cpu"), "rows": rows}, indent=2))
        return
    names = arguments.only or [IMPORTS, *COMMANDS]
    with contextlib.ExitStack() as stack:
        trees = {"this": REPOSITORY}
        if arguments.against:
            trees["against"] = stack.enter_context(worktree_of(arguments.against))
        rows = [row for name in names for row in rows_of(name, trees, arguments.times)]
    of_imports = {row["files"]: row["cpu_seconds"] for row in rows if row["name"] == IMPORTS}
    for row in rows:
        if row["name"] != IMPORTS and row["files"] in of_imports:
            row["beyond_imports"] = round(row["cpu_seconds"] - of_imports[row["files"]], 2)
    print(json.dumps({**measured_on("cpu"), "against": arguments.against, "rows": rows}, indent=2))


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a command.

    Args:
        cpu_seconds: processor seconds of all its processes.
        first_output_cpu_seconds: those that had passed at its first line of output; None: it printed none.
    """

    cpu_seconds: float
    first_output_cpu_seconds: float | None


def rows_of(name: str, trees: dict[str, Path], times: int) -> list[dict[str, Any]]:
    """Return the seconds of a command in each tree of files, which take turns."""
    runs: dict[str, list[Run]] = {which: [] for which in trees}
    for _ in range(times):
        for which, tree in trees.items():
            runs[which].append(run(name, tree))
            print(f"{name}, {which}: {runs[which][-1].cpu_seconds:.1f} s", file=sys.stderr, flush=True)
    rows = []
    for which, made in runs.items():
        row: dict[str, Any] = {"name": name, "command": _in_words(name), "files": which}
        row["cpu_seconds"] = round(statistics.median(one.cpu_seconds for one in made), 2)
        row["runs"] = [round(one.cpu_seconds, 2) for one in made]
        firsts = [one.first_output_cpu_seconds for one in made]
        if name != IMPORTS and None not in firsts:
            row["first_output_cpu_seconds"] = round(statistics.median(first for first in firsts if first), 2)
        rows.append(row)
    return rows


def run(name: str, tree: Path) -> Run:
    """Run a command once, with the files of a tree and with folders for kept results that are empty.

    Raises:
        RuntimeError: if it gives no answer.
    """
    command = [sys.executable, *_arguments(name)]
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryFile() as errors:
        environment = {key: value for key, value in os.environ.items() if key != "LOWMEM_FT_TRACE_CACHE"}
        environment |= {"XDG_CACHE_HOME": cache, "PYTHONPATH": str(tree)}
        # A session of its own, by which its processes are found.
        process = subprocess.Popen(
            command,
            cwd=tree,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        assert process.stdout is not None
        first = process.stdout.readline()
        at_first = _cpu_seconds_of_session(process.pid) if first else None
        drain = threading.Thread(target=process.stdout.read)
        drain.start()
        _, status, used = os.wait4(process.pid, 0)  # with the children that it has waited for
        process.returncode = os.waitstatus_to_exitcode(status)
        drain.join()
        process.stdout.close()
        if process.returncode not in (0, _DOES_NOT_FIT):
            errors.seek(0)
            raise RuntimeError(f"{_in_words(name)} in {tree}: {errors.read().decode(errors='replace')}")
    return Run(cpu_seconds=used.ru_utime + used.ru_stime, first_output_cpu_seconds=at_first)


def _arguments(name: str) -> list[str]:
    return (
        ["-c", _PROGRAM_OF_IMPORTS] if name == IMPORTS else ["-m", "lowmem_ft", *shlex.split(COMMANDS[name])]
    )


def _in_words(name: str) -> str:
    return _PROGRAM_OF_IMPORTS if name == IMPORTS else f"lowmem-ft {COMMANDS[name]}"


def _cpu_seconds_of_session(session: int) -> float | None:
    """Return the processor seconds so far of all processes of a session; None where the system does not tell.

    Source: proc_pid_stat(5): fields 6, and 14 to 17, the last two of which are those of children that have ended.
    """
    ticks = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = file.read_text().rpartition(")")[2].split()  # the name before it may hold anything
            if int(fields[3]) == session:
                ticks += sum(int(field) for field in fields[11:15])
    return ticks / os.sysconf("SC_CLK_TCK") if ticks else None


@contextlib.contextmanager
def worktree_of(revision: str) -> Iterator[Path]:
    """Check a revision out into a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        _git("worktree", "add", "--detach", "--quiet", str(tree), revision)
        try:
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


def _git(*arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=REPOSITORY, check=True)


def time_preflight(recipe_name: str, gpu: str) -> dict[str, Any]:
    """Return wall-clock seconds of the process that estimates before a run, twice with, twice without its imports."""
    from lowmem_ft.planning.estimator.estimate import estimate_without_timeline
    from lowmem_ft.planning.estimator.estimating_processes import EstimatingProcess
    from lowmem_ft.recipe import load_recipe

    recipe = load_recipe(recipe_name)
    seconds: dict[str, Any] = {"recipe": recipe_name, "gpu": gpu}
    for are_imports_over in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["LOWMEM_FT_TRACE_CACHE"] = folder
            for traces in ("first", "from_kept_traces"):
                start = time.perf_counter()
                process = EstimatingProcess()
                if are_imports_over:
                    process.call(estimate_without_timeline, load_recipe("tiny"), gpu)
                    start = time.perf_counter()
                process.call(estimate_without_timeline, recipe, gpu)
                name = f"{traces}{'' if are_imports_over else '_with_imports'}_seconds"
                seconds[name] = round(time.perf_counter() - start, 2)
                process.close()
    return seconds


if __name__ == "__main__":
    main()
