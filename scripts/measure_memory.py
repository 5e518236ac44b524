"""Run recipes for real and record the memory of each phase, next to the estimate.

    python scripts/measure_memory.py [--device cpu|cuda] [--rows TEXT] [--count 60] [--jobs 1] [--only-measure]
        [--out rows.json] [--table] [--write]
    python scripts/measure_memory.py --whole-runs [--model SMOLLM2] [--rows TEXT] [--repeats 3] [--out rows.json]
        [--table]

On CUDA: the shipped recipes, then random weights from 0.1B to 8B (``measuring/cuda_matrix.py``), torch's own
counters, NVML for the process, and the seconds of each step. On a CPU: tiny models of every family, a sample of all the
ways to train them (``measuring/cpu_matrix.py``), and every tensor counted exactly. Each row runs in a process of its
own, so that its peaks include no other row's cache. Rows that the file already holds are not run again. The default
file is ``runs/measured.json``. Several ``--jobs`` begin at once; on CUDA one after the other gets the GPU, when it has
imported everything. Estimates are added at the end; with ``--only-measure`` another machine adds them, later, without
the option. ``--write`` estimates each row of ``tests/data/measured/measured-cuda.json`` again, for their table in
``docs/benchmarks.md``.

``--whole-runs``: memory of whole processes of ``lowmem-ft train`` without a GPU (``measuring/whole_runs.py``), with
one and with two threads, each repeated ``--repeats`` times; SMOLLM2 is a folder with SmolLM2-135M, by default the
demo's.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from command_line import parser_of
from demo.get_demo_model import default_cache_dir, get_demo_model
from marked_table import put_table
from measured_on import driver_version, measured_on, require_device, wait_for_the_gpu
from measuring.comparison import compare, estimated_peaks, measured_gpu, table
from measuring.constant_rows import CUDA_ROWS, caveat_of_recipes
from measuring.cpu_matrix import name_of, overrides_of, sample
from measuring.cuda_matrix import cuda_rows
from measuring.families import FAMILIES, write_families
from measuring.public_seconds import updated_in_chunks_until
from measuring.real_run import RealPeaks, run_for_real
from measuring.whole_runs import WHOLE_RUNS, estimate_whole, run_whole, settings_of

from lowmem_ft.foundation.allocator_setting import SETTING_OF_RUNS, allocator_setting
from lowmem_ft.foundation.catalog.this_machine import this_machines_gpu
from lowmem_ft.foundation.memory.comparison import estimated_peaks as whole_peaks
from lowmem_ft.foundation.units import GIB, format_bytes
from lowmem_ft.planning.estimator import estimate_memory
from lowmem_ft.recipe import Recipe, load_recipe

NUM_STEPS = {"cpu": 2, "cuda": 3}
"""Number of steps by device. A CPU has no cache that takes some steps to fill."""

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"

NUM_REPEATS = 3
NUM_THREADS = (1, 2)

Row = dict[str, Any]


def main() -> int:
    """Run the rows that the file lacks; exit code 1 if a row fails."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rows", default="", help="run only rows with this text in their name")
    parser.add_argument("--count", type=int, default=60, help="rows to draw on a CPU")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--out", type=Path, default=Path("runs/measured.json"))
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--only-measure", action="store_true", help="leave the estimates to a later --table")
    parser.add_argument("--table", action="store_true", help="run nothing, print the file's errors")
    parser.add_argument(
        "--write", action="store_true", help=f"run nothing, write the table of docs/{PAGE.name}"
    )
    parser.add_argument("--whole-runs", action="store_true", help="measure processes of lowmem-ft train")
    parser.add_argument("--repeats", type=int, default=NUM_REPEATS, help="of each, for --whole-runs")
    parser.add_argument("--model", type=Path, help="a folder with SmolLM2-135M, for --whole-runs")
    parser.add_argument("--in-this-process", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write:
        rows = json.loads(CUDA_ROWS.read_text())
        put_table(PAGE, Path(__file__).name, "\n".join(table_of_runs(rows)) + "\n")
        return 0
    if not arguments.table:
        require_device(arguments.device)
    if arguments.in_this_process:
        measure_here(arguments.device, arguments.in_this_process)
        return 0
    rows: list[Row] = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    if arguments.whole_runs:
        if not arguments.table:
            model = arguments.model or get_demo_model(default_cache_dir())
            add_whole_runs(rows, model, arguments.rows, arguments.repeats, arguments.out)
        print_whole_runs(rows)
        return 0
    wanted = {} if arguments.table else wanted_rows(arguments.device, arguments.count, arguments.seed)
    wanted = {name: overrides for name, overrides in wanted.items() if arguments.rows in name}
    failed = run_missing(wanted, rows, arguments.device, arguments.out, arguments.jobs)
    if not arguments.only_measure:
        add_estimates(rows, arguments.out)
    print_errors(rows)
    return 1 if failed else 0


def wanted_rows(device: str, count: int, seed: int) -> dict[str, tuple[str, ...]]:
    """Return the settings of each row by its name."""
    if device == "cuda":
        return cuda_rows()
    return {name_of(levels): overrides_of(levels) for levels in sample(count, seed)}


def run_missing(
    wanted: dict[str, tuple[str, ...]], rows: list[Row], device: str, out: Path, num_jobs: int = 1
) -> list[str]:
    """Run the rows that are missing and write the file after each; return the names of those that failed."""
    there = {row["name"] for row in rows}
    failed: list[str] = []
    missing = {name: overrides for name, overrides in wanted.items() if name not in there}
    out.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with ThreadPoolExecutor(num_jobs) as pool:
        running = {
            pool.submit(in_new_process, device, name, settings): name for name, settings in missing.items()
        }
        for number, done in enumerate(as_completed(running), start=1):
            name, row = running[done], done.result()
            if row is None:
                failed.append(name)
            else:
                rows.append(row)
                replace_file(out, rows)
            told = "FAILED" if row is None else _in_short(row)
            print(
                f"[{number}/{len(missing)}] {name}: {told}, {time.perf_counter() - start:.0f} s", flush=True
            )
    return failed


def add_whole_runs(rows: list[Row], smollm2: Path, text: str, num_repeats: int, out: Path) -> None:
    """Measure the missing whole runs with this text in their name, and write the file after each."""
    there = {(row["name"], row["threads"]) for row in rows}
    out.parent.mkdir(parents=True, exist_ok=True)
    for name, threads in itertools.product(WHOLE_RUNS, NUM_THREADS):
        if text not in name or (name, threads) in there:
            continue
        repeats = [run_whole(name, smollm2, threads) for _ in range(num_repeats)]
        row: Row = {
            "name": name,
            "overrides": settings_of(name, "{smollm2}", "{families}"),
            "threads": threads,
        }
        row |= measured_on("cpu") | {"measured": repeats}
        row["hardware"] = row["hardware"].partition(",")[0]  # the threads are the run's own
        rows.append(row)
        replace_file(out, rows)


def print_whole_runs(rows: list[Row]) -> None:
    """Print a line for each phase of each run: the estimate of now, and the lowest and highest measurement."""
    for row in rows:
        peaks = whole_peaks(estimate_whole(row["name"]))
        for phase in ("load", "step", "peak"):
            estimated = peaks.peak_bytes if phase == "peak" else peaks.by_phase[phase]
            measured = [repeat[phase] for repeat in row["measured"]]
            least, most = format_bytes(min(measured)), format_bytes(max(measured))
            print(
                f"{row['name']:24} {row['threads']} threads  {phase:5} {format_bytes(estimated):>9} estimated, "
                f"{least:>9} to {most:>9} measured: {estimated / max(measured) - 1:+.1%}"
            )


def in_new_process(device: str, name: str, overrides: Sequence[str]) -> Row | None:
    """Run :func:`measure_here` where nothing else has raised the peaks; None if nothing could be measured."""
    command = [sys.executable, __file__, "--device", device, "--in-this-process", *overrides]
    environment = {
        **os.environ,
        "PYTORCH_ALLOC_CONF": allocator_setting(SETTING_OF_RUNS),
    }  # as a run's command does
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    row: Row = {"name": name, "overrides": list(overrides)}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            row |= json.loads(line)
    row["command"] = " ".join(["python", *sys.argv])
    return row if "measured" in row else None


def measure_here(device: str, overrides: Sequence[str]) -> None:
    """Print the measurement as one line of JSON."""
    if device == "cuda":
        wait_for_the_gpu()
    with tempfile.TemporaryDirectory() as folder:
        recipe = recipe_of(overrides, Path(folder))
        peaks = run_for_real(recipe, num_steps=NUM_STEPS[device])
        print(json.dumps(described(device, peaks)), flush=True)


def add_estimates(rows: list[Row], out: Path) -> None:
    """Estimate the rows that have no estimate, for the GPU that they ran on, and write the file after each."""
    with tempfile.TemporaryDirectory() as folder:
        for row in rows:
            if "estimated" not in row:
                estimate = estimate_memory(recipe_of(row["overrides"], Path(folder)), measured_gpu(row))
                row["estimated"] = estimated_peaks(estimate)
                replace_file(out, rows)


def recipe_of(overrides: Sequence[str], folder: Path) -> Recipe:
    """Return the recipe of a row, by default without a base; a tiny family's model is written to ``folder``."""
    write_families(folder)
    tiny = {f"model={name}": f"model={folder / name}" for name in FAMILIES}
    name = next((text.removeprefix("recipe=") for text in overrides if text.startswith("recipe=")), None)
    settings = [tiny.get(text, text) for text in overrides if not text.startswith("recipe=")]
    return load_recipe(name, settings)


def described(device: str, peaks: RealPeaks) -> Row:
    """Return the measurement with its hardware and versions."""
    measured = dataclasses.asdict(peaks)
    row = measured_on(device) | measured.pop("rows")
    if device == "cpu":
        return {**row, "gpu": None, "measured": measured}
    gpu = this_machines_gpu()
    row["versions"] |= {"cuda": str(torch.version.cuda), "driver": driver_version()}
    return {
        **row,
        "gpu": {
            "name": gpu.name,
            "memory_bytes": gpu.memory_bytes,
            "compute_capability": list(gpu.compute_capability),
            "num_multiprocessors": gpu.num_multiprocessors,
            "segments_grow": allocator_setting() == SETTING_OF_RUNS,
        },
        "measured": measured,
    }


def replace_file(out: Path, rows: list[Row]) -> None:
    """Write the rows so that the file is never half written."""
    draft = out.with_suffix(".draft")
    draft.write_text(json.dumps(rows, indent=1) + "\n")
    draft.replace(out)


def print_errors(rows: list[Row]) -> None:
    """Print median, worst and under-prediction over all rows with an estimate."""
    comparisons = [
        comparison
        for row in rows
        if "estimated" in row
        for comparison in compare(row["name"], row["measured"], row["estimated"])
    ]
    for line in table(comparisons):
        print(line)


def table_of_runs(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of a table of runs on a GPU: measured numbers, and how far each estimate is from them."""
    columns = ("tensors, GiB", "reserved, GiB", "process, GiB", "s a step")
    yield from caveat_of_recipes()
    yield f"| run | day | {' | estimate | '.join(columns)} | estimate |"
    yield f"|---|---|{'---:|---:|' * len(columns)}"
    with tempfile.TemporaryDirectory() as folder:
        for row in rows:
            with updated_in_chunks_until(row["date"]):
                estimate = estimate_memory(recipe_of(row["overrides"], Path(folder)), measured_gpu(row))
            assert estimate.step is not None
            measured = row["measured"]
            bytes_of = (
                (max(measured["allocated"].values()), estimate.allocated_peak_bytes),
                (max(measured["reserved"].values()), estimate.reserved_peak_bytes),
                (measured["process"], estimate.process_peak_bytes),
            )
            cells = [f"{real / GIB:.2f} | {found / real - 1:+.2%}" for real, found in bytes_of]
            if seconds := measured.get("seconds"):
                real = statistics.median(seconds[1:])
                cells.append(f"{real:.2f} | {estimate.step.seconds / real - 1:+.0%}")
            else:
                cells.append("|")
            yield f"| `{row['name']}` | {row['date'][5:]} | {' | '.join(cells)} |"
    one = rows[0]
    versions = ", ".join(f"{name} {number}" for name, number in one["versions"].items())
    yield ""
    yield f"{one['hardware']}, {one['date'][:4]}; {versions}."


def _in_short(row: Row) -> str:
    if "estimated" not in row:
        peak, seconds = max(row["measured"]["allocated"].values()), min(row["measured"]["seconds"])
        return f"{format_bytes(peak)} of tensors, {seconds:.3g} s a step"
    errors = compare(row["name"], row["measured"], row["estimated"])
    return ", ".join(f"{error.metric} {error.error:+.2%}" for error in errors if error.phase == "run")


if __name__ == "__main__":
    sys.exit(main())
