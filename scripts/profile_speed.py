"""Profile one step of our recipes, and of the peers that ``bench_speed.py`` compares them with, on this machine's GPU.

    python scripts/profile_speed.py --work 8b-full --runs ours:0 ours:3 2:off [--out FILE]
    python scripts/profile_speed.py --write

Each run, named as in ``bench_speed.py``, is a process of its own, with random weights; the third of five steps is
recorded by torch's profiler, kernels alone. It says how long the GPU computes and how long it waits for the host, which
the clock of ``docs/clock.md`` only estimates. ``--write`` runs nothing, and writes the table of
``tests/data/measured/profiles-cuda.json`` into ``docs/benchmarks.md``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bench_speed
import torch
from ground_truth.constant_rows import OF_COMPARISONS, caveat_of
from ground_truth.measured_rows import Documents, described, documents_of, name_of
from marked_table import with_table
from measured_on import measured_on, require_device, wait_for_the_gpu
from speed.kernel_trace import KINDS, digest, events_of
from speed.peer_settings import setting_of
from speed.this_gpu import ThisGPU
from speed.work_runs import run_on
from speed.works import WORKS, title_of
from torch.profiler import ProfilerActivity, profile

DATA = bench_speed.ROOT / "tests" / "data" / "measured" / "profiles-cuda.json"
STEPS, PROFILED = 5, 3


class ProfiledGPU(ThisGPU):
    """This machine's GPU, which times every step and profiles one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._profile = profile(activities=[ProfilerActivity.CUDA])
        self._began = time.perf_counter()

    def end_step(self) -> None:
        """Wait for a step's work; the next step begins at once."""
        torch.cuda.synchronize(self.device)
        self.seconds.append(time.perf_counter() - self._began)
        if len(self.seconds) == PROFILED:
            self._profile.stop()
        elif len(self.seconds) == PROFILED - 1:
            self._profile.start()
        self._began = time.perf_counter()

    def events(self) -> list[dict[str, Any]]:
        """Return what the GPU did in the profiled step: kernels, copies, fills; ``ts`` and ``dur`` in microseconds."""
        return events_of(self._profile)


def main() -> None:
    """Profile, or write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", choices=WORKS, default="8b-full")
    parser.add_argument("--runs", nargs="+", default=["ours:0", "2:off"])
    parser.add_argument(
        "--documents", type=documents_of, default=bench_speed.ONE_DOCUMENT, help=bench_speed.HELP
    )
    parser.add_argument("--out", type=Path, default=Path("runs/profiles.json"))
    parser.add_argument("--write", action="store_true", help="run nothing, write the table")
    parser.add_argument("--in-this-process", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write:
        table = "\n".join(lines_of(json.loads(DATA.read_text()))) + "\n"
        page = bench_speed.PAGE
        page.write_text(with_table(page.read_text(), Path(__file__).name, table))
        return
    require_device("cuda")
    if arguments.in_this_process:
        print(json.dumps(profiled(arguments.work, arguments.in_this_process, arguments.documents)))
        return
    rows = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    for run in arguments.runs:
        command = [sys.executable, __file__, "--work", arguments.work, "--in-this-process", run]
        command += ["--documents", name_of(arguments.documents)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")
        print(f"{run}: {rows[-1]}", flush=True)


def profiled(work_name: str, run: str, documents: Documents) -> dict[str, Any]:
    """Run a work's steps in this process, and return where the seconds of the profiled one went."""
    work, gpu = WORKS[work_name], ProfiledGPU()
    wait_for_the_gpu()
    run_on(gpu, work, run, documents, num_steps=STEPS, after_step=gpu.end_step)
    undisturbed = [*gpu.seconds[1 : PROFILED - 1], *gpu.seconds[PROFILED:]]
    found = digest(gpu.events()) | {"seconds": statistics.median(undisturbed)}
    is_ours = run in work.ours()
    title = title_of(work.ours()[run] if is_ours else work, None if is_ours else setting_of(run), documents)
    return {
        "work": work_name,
        "run": title,
        **described(documents),
        **found,
        **measured_on(torch.device("cuda")),
    }


def lines_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of the table."""
    kinds = [*KINDS, "others"]
    lines = [
        *caveat_of(rows, OF_COMPARISONS),
        f"| run | s a step | profiled, s | GPU computes, s | GPU waits, s | kernels | {', s | '.join(kinds)}, s |",
        f"|---|{'---:|' * (5 + len(kinds))}",
    ]
    for row in rows:
        busy, span, by_kind = row["busy_seconds"], row["profiled_seconds"], row["seconds_by_kind"]
        numbers = [row["seconds"], span, busy, span - busy]
        cells = [f"{number:.2f}" for number in numbers] + [f"{row['kernels']:,}"]
        cells += [f"{by_kind.get(kind, 0):.2f}" for kind in kinds]
        lines.append(f"| {row['run']} | {' | '.join(cells)} |")
    versions = ", ".join(f"{name} {number}" for name, number in rows[0]["versions"].items())
    return [*lines, "", f"{rows[0]['hardware']}, {rows[0]['date']}; {versions}."]


if __name__ == "__main__":
    main()
