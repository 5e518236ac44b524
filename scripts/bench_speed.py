"""Seconds and memory of our recipes next to the trainers that people would pick, on the same rows and the same clock.

    python scripts/bench_speed.py [--works 8b-full 7b-lora ...] [--device cuda] [--write]

Each work is one model on one GPU with 16 rows of 2048 tokens a step. The peer's program is its own code, as installed,
on a virtual GPU: ``transformers.Trainer`` or TRL's ``SFTTrainer`` with Liger's kernels, PEFT and bitsandbytes. Each of
several sizes of micro-batches runs with checkpointing and without; the fastest one that fits the GPU counts. A step of
one and a step of two micro-batches run; seconds of more follow from the difference, and two hold as much memory as
more. torchtune is not installed: a loop does what its single-device recipe does (bitsandbytes' paged 8-bit AdamW in the
backward pass of every micro-batch, every layer checkpointed, whole logits). Ours is a shipped recipe with the settings
that the table names. Each run is a process of its own, as Liger replaces functions of transformers for good.

The table goes into ``docs/benchmarks.md`` with ``--write``. Everything is by the clock of ``docs/clock.md``, or, with
``--device cuda``, measured on this machine's GPU: random weights, the median of three steps with all their
micro-batches after a first one that does not count, and what the driver reports for the process. Its rows are written
to ``--out``; ``--write-measured`` writes a table of those in ``tests/data/measured/speed-cuda.json``.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import marked_table
import torch
from measured_on import measured_on, require_device
from speed.peers import ROWS, TOKENS
from speed.this_gpu import Result
from speed.work_runs import by_clock, measured, ours
from speed.works import WORKS, setting_of, text_of, title_of

from lowmem_ft.foundation.units import GIB

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
MEASURED = ROOT / "tests" / "data" / "measured" / "speed-cuda.json"


def main() -> None:
    """Run every work, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument(
        "--settings",
        nargs="+",
        type=setting_of,
        help="micro-batches to try for the peer, such as 2:off for 2 rows and no checkpointing; by default all",
    )
    parser.add_argument("--device", choices=["cuda"], help="measure on this machine's GPU")
    parser.add_argument("--out", type=Path, default=Path("runs/bench_speed.json"), help="(--device cuda)")
    parser.add_argument("--write", action="store_true", help=f"write the table into docs/{PAGE.name}")
    parser.add_argument(
        "--write-measured", action="store_true", help="run nothing, write the table of what was measured"
    )
    parser.add_argument("--in-this-process", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write and arguments.device:
        parser.error("--write is for the virtual clock's table: leave --device out")
    if arguments.write_measured:
        table = "\n".join(measured_lines(json.loads(MEASURED.read_text()))) + "\n"
        PAGE.write_text(
            marked_table.with_table(PAGE.read_text(), f"{Path(__file__).name} --device cuda", table)
        )
        return
    if arguments.device:
        require_device(arguments.device)
    if arguments.in_this_process:
        name, setting = arguments.in_this_process
        result = (measured if arguments.device else by_clock)(name, setting)
        print(json.dumps(dataclasses.asdict(result)))
        return
    if arguments.device:
        measure(arguments.works, arguments.settings, arguments.out)
        return
    lines = [
        "| work | run | s a step | tokens/s | outside products, s | process, GiB | ratio of tokens/s | of memory |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in arguments.works:
        for line in compared(name, arguments.settings):
            print(line, flush=True)
            lines.append(line)
    if arguments.write:
        table = "\n".join([*lines, "", _versions(), ""])
        PAGE.write_text(marked_table.with_table(PAGE.read_text(), Path(__file__).name, table))


def measure(names: Sequence[str], settings: Sequence[tuple[int, bool]] | None, out: Path) -> None:
    """Run works on this machine's GPU, ours first, and write each run as soon as it is there."""
    rows: list[dict[str, Any]] = json.loads(out.read_text()) if out.exists() else []
    out.parent.mkdir(parents=True, exist_ok=True)
    for name in names:
        titles = {setting: title_of(work, None) for setting, work in WORKS[name].ours().items()}
        titles |= {text_of(one): title_of(WORKS[name], one) for one in settings or WORKS[name].peer.settings}
        with ThreadPoolExecutor(2) as pool:  # one imports everything while the other has the GPU
            results = pool.map(functools.partial(_in_new_process, name, options=("--device", "cuda")), titles)
            for title, result in zip(titles.values(), results, strict=True):
                if result is None:
                    continue
                row = {"work": name, "run": title, **dataclasses.asdict(result)}
                del row["outside_products"], row["fits"]
                rows.append(row | measured_on(torch.device("cuda")) | {"libraries": _versions()})
                out.write_text(json.dumps(rows, indent=1) + "\n")


def measured_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table of runs on a GPU: of each work the peer's runs, the fastest first, then ours next to that."""
    lines = [
        "| work | run | s a step | tokens/s | process, GiB | ratio of tokens/s | of memory |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for name, members in itertools.groupby(rows, lambda row: row["work"]):
        of_work = sorted(members, key=lambda row: (row["run"].startswith("ours"), row["seconds"]))
        best = of_work[0]
        for row in of_work:
            seconds, held = row["seconds"], row["process_bytes"]
            ratios = f"{best['seconds'] / seconds:.2f} | {held / best['process_bytes']:.2f}"
            if not row["run"].startswith("ours"):
                ratios = "|"
            numbers = f"{seconds:.2f} | {ROWS * TOKENS / seconds:,.0f} | {held / GIB:.1f}"
            lines.append(f"| {name if row is best else ''} | {row['run']} | {numbers} | {ratios} |")
    return [*lines, "", f"{rows[0]['hardware']}, {rows[0]['date']}. {rows[0]['libraries']}"]


def compared(name: str, settings: Sequence[tuple[int, bool]] | None = None) -> list[str]:
    """Return a work's lines: the peer's fastest run that fits its GPU, ours, and the variants of ours."""
    work = WORKS[name]
    fitting: dict[tuple[int, bool], Result] = {}
    too_large: set[bool] = set()
    for rows, checkpoints in settings or work.peer.settings:  # fewer rows first
        result = None if checkpoints in too_large else _in_new_process(name, text_of((rows, checkpoints)))
        if result is not None and result.fits:
            fitting[rows, checkpoints] = result
        else:
            too_large.add(checkpoints)
    setting, best = min(fitting.items(), key=lambda pair: pair[1].seconds, default=(None, None))
    its = f"{work.peer.title}: no setting fits" if setting is None else title_of(work, setting)
    return [
        _line(f"{work.recipe}, {work.gpu}", its, best),
        *(
            _line("", title_of(one, None), ours(one), than=best, goal=work.goal)
            for one in work.ours().values()
        ),
    ]


def _in_new_process(name: str, text: str, options: Sequence[str] = ()) -> Result | None:
    """Run a peer's program, or ours, in a process of its own; None: it fails, which is printed."""
    command = [sys.executable, __file__, *options, "--in-this-process", name, text]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{name} {text}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return None
    result = Result(**json.loads(done.stdout.splitlines()[-1]))
    print(f"{name} {text}: {result}", file=sys.stderr, flush=True)
    return result


def _line(
    work: str,
    run: str,
    result: Result | None,
    than: Result | None = None,
    goal: tuple[float, float] | None = None,
) -> str:
    if result is None:
        return f"| {work} | {run} | | | | | | |"
    ratios = ["", ""]
    if than is not None and goal is not None:
        ratios = [
            f"{than.seconds / result.seconds:.2f} (goal {goal[0]})",
            f"{result.process_bytes / than.process_bytes:.2f} (goal {goal[1]})",
        ]
    numbers = (
        f"{result.seconds:.2f}",
        f"{ROWS * TOKENS / result.seconds:,.0f}",
        f"{result.outside_products:.2f}",
        f"{result.process_bytes / GIB:.1f}",
    )
    return "| " + " | ".join((work, run, *numbers, *ratios)) + " |"


def _versions() -> str:
    packages = ("torch", "transformers", "trl", "peft", "bitsandbytes", "liger-kernel", "triton")
    return "By " + ", ".join(f"{name} {version(name)}" for name in packages) + "."


if __name__ == "__main__":
    main()
