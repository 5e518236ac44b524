"""Runs of several processes that share a model, of which one is killed at a random moment, and undisturbed runs.

A launch is torchrun's agent alone, with processes forked from this one, which has imported everything: that takes a
tenth of torchrun's time. The results of runs are compared bit for bit.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import accelerate  # noqa: F401 every process of a run needs it
import datasets  # noqa: F401
import psutil
import torch
from safetensors.torch import load_file
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from transformers.models.llama import modeling_llama  # noqa: F401

import lowmem_ft.planning.preflight.train  # noqa: F401
from lowmem_ft.cli.commands.train import main

NUM_STEPS, SAVE_STEPS, EVAL_STEPS = 12, 3, 2
LIMIT_SECONDS = 1800.0
"""Ends a launch that hangs, not one on a busy machine; the time of each is reported, but is not a problem."""
POLL_SECONDS = 0.002

SETTINGS = (
    "recipe=tiny",
    "distributed.strategy=fsdp2",
    "training.use_cpu=true",
    "budget.preflight=false",
    f"training.max_steps={NUM_STEPS}",
    f"training.save_steps={SAVE_STEPS}",
    f"training.eval_steps={EVAL_STEPS}",
    "training.save_total_limit=2",
)
RESUMED = "training.resume_from_checkpoint=auto"

Phase = str
WEIGHTS: dict[Phase, int] = {"start": 2, "step": 3, "evaluation": 3, "save": 4, "end": 1}
"""Relative frequency with which each is drawn, if it is still to come."""


Found = TypeVar("Found")


class Kind(NamedTuple):
    """A run that can be killed: its name, its number of processes, and its settings in addition to :data:`SETTINGS`."""

    name: str
    num_processes: int
    settings: tuple[str, ...]


KINDS = (
    Kind(
        "split24, 8-bit state, 2 processes",
        2,
        ("model.dtype=bfloat16", "optimizer.master=split24", "optimizer.state=8bit"),
    ),
    Kind("float32, 3 processes", 3, ()),
    Kind("LoRA with dropout, 2 processes", 2, ("adapter.name=lora", "adapter.lora_dropout=0.1")),
    Kind(
        "updates in backward, 3 processes",
        3,
        ("accumulation.order=vertical", "optimizer.in_backward=true", "offload.activations=inputs"),
    ),
)


@dataclass(frozen=True)
class Moment:
    """The moment at which a process is killed.

    Args:
        rank: rank of the process.
        phase: the run's phase.
        step: the optimizer step that the phase belongs to; 0 for ``start`` and ``end``.
        delay_seconds: seconds after the phase's first sign.
    """

    rank: int
    phase: Phase
    step: int
    delay_seconds: float

    def __str__(self) -> str:
        """Return text such as ``rank 1 in save 6 + 0.012 s``."""
        return f"rank {self.rank} in {self.phase} {self.step or ''} + {self.delay_seconds:.3f} s"


@dataclass(frozen=True)
class Ended:
    """The end of a launch.

    Args:
        code: the launcher's exit code.
        was_killed: whether one of its processes was killed before.
        seconds: from the kill to the end, or from the beginning.
        num_left: processes that still existed when the launcher had ended.
        said: its output.
    """

    code: int
    was_killed: bool
    seconds: float
    num_left: int
    said: str


class KilledRuns:
    """Kills and resumes runs, and collects problems; makes one whole run for each kind.

    Args:
        folder: for runs and the logs of their launches.
        draw: random numbers from the seed.
        report: called with a line for each launch.
    """

    def __init__(self, folder: Path, draw: random.Random, report: Callable[[str], None]) -> None:
        gc.freeze()  # or each collection in a fork would copy all imported objects
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder.absolute()
        self.problems: list[str] = []
        self.phases: list[Phase] = []
        self.num_runs = self.num_cut_short = 0
        self.longest_seconds = 0.0
        self._draw = draw
        self._report = report
        self._whole: dict[Kind, Path] = {}
        self._whole_seconds = 0.0

    @property
    def num_kills(self) -> int:
        """Number of kills so far."""
        return len(self.phases)

    def kill_and_go_on(self, kind: Kind, *, most_kills: int) -> None:
        """Make one run: killed up to three times, then left to finish."""
        whole = self._whole_run(kind)
        run = self.folder / f"run-{self.num_runs}"
        self.num_runs += 1
        kills, settings = min(self._draw.randint(1, 3), most_kills), ()
        for _ in range(kills):
            moment = random_moment(self._draw, kind, run, self._whole_seconds)
            ended = self._launch(kind, run, moment, settings)
            settings = (RESUMED,)
            if ended.was_killed:
                self.phases.append(moment.phase)
                self.num_cut_short += bool(left_behind(run))
                self.longest_seconds = max(self.longest_seconds, ended.seconds)
                self._note(run, str(moment), problem_with_kill(ended))
        self._launch(kind, run, None, settings)
        self._note(run, "at its end", difference(whole, run))

    def _whole_run(self, kind: Kind) -> Path:
        if kind not in self._whole:
            run = self.folder / f"whole-{len(self._whole)}"
            ended = self._launch(kind, run, None, ())
            self._whole_seconds = ended.seconds
            self._whole[kind] = run
        return self._whole[kind]

    def _launch(self, kind: Kind, run: Path, moment: Moment | None, settings: tuple[str, ...]) -> Ended:
        log = self.folder / f"{run.name}-{len(list(self.folder.glob(f'{run.name}-*.log')))}.log"
        ended = launch(kind, run, log, moment, *settings)
        how = f"killed, ended {ended.seconds:.1f} s later" if ended.was_killed else "ended"
        left = f", left {left_behind(run)}" if left_behind(run) else ""
        self._report(
            f"{run.name} ({kind.name}), {moment or 'not killed'}: {how} with code {ended.code}{left}"
        )
        if moment is None and ended.code != 0:
            self._note(run, "not killed", f"failed: {ended.said[-3000:]}")
        return ended

    def _note(self, run: Path, when: str, problem: str | None) -> None:
        if problem is not None:
            self.problems.append(f"{run.name}, {when}: {problem}")
            self._report(f"PROBLEM {self.problems[-1]}")


def random_moment(draw: random.Random, kind: Kind, run: Path, whole_seconds: float) -> Moment:
    """Draw a moment of a launch that resumes from what the run folder holds.

    Args:
        draw: random numbers from the seed.
        kind: kind of the run.
        run: its folder.
        whole_seconds: seconds of an undisturbed launch.
    """
    begun = max((_step_of(folder) for folder in run.glob("checkpoint-*[0-9]")), default=0)
    ahead = range(begun + 1, NUM_STEPS + 1)
    steps: dict[Phase, list[int]] = {
        "start": [0],
        "step": [step for step in ahead if step < NUM_STEPS],
        "evaluation": [step for step in ahead if step % EVAL_STEPS == 0],
        "save": [step for step in ahead if step % SAVE_STEPS == 0],
        "end": [0],
    }
    possible = [phase for phase in steps if steps[phase]]
    [phase] = draw.choices(possible, [WEIGHTS[phase] for phase in possible])
    longest = {"start": whole_seconds / 2, "step": 0.2, "evaluation": 0.06, "save": 0.05, "end": 0.08}[phase]
    return Moment(
        draw.randrange(kind.num_processes), phase, draw.choice(steps[phase]), draw.uniform(0, longest)
    )


def launch(kind: Kind, run: Path, log: Path, moment: Moment | None, *settings: str) -> Ended:
    """Start or resume a run, and kill one of its processes at a moment; None: kill no process.

    Raises:
        psutil.TimeoutExpired: if it does not end.
    """
    arguments = [*SETTINGS, *kind.settings, *settings, f"training.output_dir={run}"]
    began = time.monotonic()
    launcher = _start(arguments, kind.num_processes, log)
    processes: list[psutil.Process] = []
    try:
        if moment is not None:
            processes = _wait_for(launcher, lambda: _processes(launcher, kind)) or []
            if _wait_for(launcher, lambda: _has_come(moment, run, log)):
                time.sleep(moment.delay_seconds)
            began = time.monotonic()
            with contextlib.suppress(psutil.NoSuchProcess, IndexError):
                processes[moment.rank].kill()
        code = launcher.wait(LIMIT_SECONDS)
        seconds = time.monotonic() - began
        num_left = sum(_is_alive(process) for process in processes)
    finally:
        for process in (launcher, *processes):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    said = log.read_text("utf-8", errors="replace")
    return Ended(code, "Signal 9" in said, seconds, num_left, said)


def _start(arguments: list[str], num_processes: int, log: Path) -> psutil.Process:
    process_id = os.fork()
    if process_id:
        return psutil.Process(process_id)
    try:
        written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(written, 1)
        os.dup2(written, 2)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_processes,
            run_id=log.stem,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            monitor_interval=0.1,
            start_method="fork",
        )
        elastic_launch(config, _train)(*arguments)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


def _train(*arguments: str) -> None:
    """Run one process of a launch; it must not inherit the agent's handler of SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if code := main(arguments):
        sys.exit(code)


def problem_with_kill(ended: Ended) -> str | None:
    """Return what is wrong with the end of a launch after a kill; None if nothing is."""
    if ended.code == 0:
        return "the launch succeeded though one of its processes was killed"
    if ended.num_left:
        return f"{ended.num_left} processes were left when the launcher had ended"
    if ours := re.search(r'File ".*/lowmem_ft/.*', ended.said):
        return f"a traceback instead of an error: {ours[0]}"
    return None


def difference(whole: Path, run: Path) -> str | None:
    """Return the difference between the ends of two runs: losses, norms, weights, state, files; None if not a bit."""
    if (expected := _records(whole)) != (found := _records(run)):
        step = next((one for one in zip(expected, found, strict=False) if one[0] != one[1]), "their number")
        return f"metrics.jsonl: {step}"
    if (files := _files(whole)) != _files(run):
        return f"files, such as {sorted(files ^ _files(run))[:3]}"
    for file in sorted(name for name in files if name.endswith(".safetensors")):
        first, second = load_file(whole / file), load_file(run / file)
        if first.keys() != second.keys():
            return f"{file}: {sorted(first.keys() ^ second.keys())}"
        for name in first:
            if not torch.equal(first[name], second[name]):
                return f"{file}: {name}"
    return None


def left_behind(run: Path) -> str:
    """Return the names of folders that a killed launch has not finished."""
    return ", ".join(sorted(path.name for path in run.glob("*.incomplete")))


def _records(run: Path) -> list[tuple[object, ...]]:
    """Return the values that must be the same in two runs."""
    keys = ("step", "epoch", "loss", "eval_loss", "learning_rate", "grad_norm", "tokens", "skipped_steps")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    kept = [record for record in records if "loss" in record or "eval_loss" in record]
    return [tuple(record.get(key) for key in keys) for record in kept]


def _files(run: Path) -> set[str]:
    return {str(file.relative_to(run)) for file in run.rglob("*") if file.is_file()}


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def _has_come(moment: Moment, run: Path, log: Path) -> bool:
    """Return whether the launch's output shows the first sign of a moment's phase."""
    if moment.phase == "start":
        return True
    if moment.phase == "end":
        return f"Step {NUM_STEPS}: held-out" in log.read_text("utf-8", errors="replace")
    if f"step {moment.step}/{NUM_STEPS} " not in log.read_text("utf-8", errors="replace"):
        return False
    return moment.phase != "save" or bool(list(run.glob(f"checkpoint-{moment.step}*")))


def _processes(launcher: psutil.Process, kind: Kind) -> list[psutil.Process]:
    """Return the processes of a launch in the order of their ranks, once all exist; empty before."""
    with contextlib.suppress(psutil.NoSuchProcess):
        found = sorted(launcher.children(), key=lambda process: process.pid)
        return found if len(found) == kind.num_processes else []
    return []


def _wait_for(launcher: psutil.Process, look: Callable[[], Found]) -> Found | None:
    """Return what ``look`` finds, as soon as it finds anything; None if the launch ends before, or takes too long."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while _is_alive(launcher) and time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(POLL_SECONDS)
    return None


def _is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
