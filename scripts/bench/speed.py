"""Seconds and memory of our recipes next to the trainers that people would pick, on the same rows and the same clock.

    python scripts/bench speed [--works 8b-full 7b-lora ...] [--documents 1x2048] [--device cuda] [--write]

Each work is one model on one GPU with 16 rows of 2048 tokens a step, random ones, the same for both
(``measuring/measured_rows.py``). The peer's program is its own code, as installed, on a virtual GPU:
``transformers.Trainer`` or TRL's ``SFTTrainer`` with Liger's kernels, PEFT and bitsandbytes. Each of several sizes of
micro-batches runs without checkpointing and, where that does not fit, with it; with each head that the tool lets its
users choose, and with torch.compile, which a virtual GPU does not see and by the clock is left out; the fastest setting
that fits the GPU counts. A step of one and a step of two micro-batches run; seconds of more follow from the difference,
and two hold as much memory as more. torchtune is not installed: a loop does what its single-device recipe does
(bitsandbytes' paged 8-bit AdamW in the backward pass of every micro-batch, every layer checkpointed, whole logits).
Ours is a shipped recipe with the settings that the table names. Each run is a process of its own, as Liger replaces
functions of transformers for good.

The table goes into ``docs/benchmarks.md`` with ``--write``. Everything is by the clock of ``docs/clock.md``, or, with
``--device cuda``, measured on this machine's GPU: random weights, the median of three steps with all their
micro-batches after a first one that does not count, and what the driver reports for the process. Its rows are written
to ``--out``; ``--write-measured`` writes a table of those in ``tests/data/measured/speed-cuda.json``.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from command_line import answer_of_new_process, parser_of
from marked_table import put_table
from measured_on import measured_on, require_device
from measuring.constant_rows import CONSTANT, OF_COMPARISONS, caveat_of, caveat_of_the_clock, kind_of_rows
from measuring.measured_rows import (
    Documents,
    described,
    documents_of,
    name_of,
)
from speed.peer_settings import ROWS, TOKENS, Setting, setting_of
from speed.this_gpu import Result
from speed.work_runs import by_clock, measured, ours
from speed.works import WORKS, title_of

from lowmem_ft.foundation.units import GIB

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"
MEASURED = ROOT / "tests" / "data" / "measured" / "speed-cuda.json"
ONE_DOCUMENT = (TOKENS,)
HELP = "documents of a row and tokens of each, such as 4x512 (default: 1x2048)"


def main() -> None:
    """Run every work, and print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument(
        "--settings",
        nargs="+",
        type=setting_of,
        help=(
            "settings to try for the peer, such as 2:off for 2 rows and no checkpointing, 2:off:whole with whole "
            "logits, 2:off:compiled; by default all"
        ),
    )
    parser.add_argument("--documents", type=documents_of, default=ONE_DOCUMENT, help=HELP)
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
        put_table(PAGE, "bench speed --device cuda", table)
        return
    documents: Documents = arguments.documents
    if sum(documents) != TOKENS:
        parser.error(f"--documents: a row has {TOKENS} tokens, got {name_of(documents)}")
    if arguments.device:
        require_device(arguments.device)
    if arguments.in_this_process:
        name, setting = arguments.in_this_process
        result = (measured if arguments.device else by_clock)(name, setting, documents)
        print(json.dumps(dataclasses.asdict(result)))
        return
    if arguments.device:
        measure(arguments.works, arguments.settings, documents, arguments.out)
        return
    lines = [
        *caveat_of_the_clock(),
        "| work | run | s a step | tokens/s | outside products, s | process, GiB | ratio of tokens/s | of memory |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in arguments.works:
        for line in compared(name, arguments.settings, documents):
            print(line, flush=True)
            lines.append(line)
    if arguments.write:
        table = "\n".join([*lines, "", f"Rows of {name_of(documents)} tokens. {_versions()}", ""])
        put_table(PAGE, "bench speed", table)


def measure(
    names: Sequence[str], settings: Sequence[Setting] | None, documents: Documents, out: Path
) -> None:
    """Run works on this machine's GPU, ours first, and write each run as soon as it is there."""
    rows: list[dict[str, Any]] = json.loads(out.read_text()) if out.exists() else []
    out.parent.mkdir(parents=True, exist_ok=True)
    for name in names:
        work = WORKS[name]
        titles = {run: title_of(one, None, documents) for run, one in work.ours().items()}
        titles |= {str(one): title_of(work, one, documents) for one in settings or work.peer.settings}
        options = ("--device", "cuda", "--documents", name_of(documents))
        with ThreadPoolExecutor(2) as pool:  # one imports everything while the other has the GPU
            results = pool.map(functools.partial(_in_new_process, name, options=options), titles)
            for title, result in zip(titles.values(), results, strict=True):
                if result is None:
                    continue
                row = {"work": name, "run": title, **described(documents), **dataclasses.asdict(result)}
                del row["outside_products"], row["fits"]
                rows.append(row | measured_on("cuda") | {"libraries": _versions()})
                out.write_text(json.dumps(rows, indent=1) + "\n")


def measured_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table of runs on a GPU: of each work the peer's runs, the fastest first, then ours next to that.

    Runs on other rows are a group of their own, and those on constant ones have no ratio: a ratio is one of runs on the
    same rows.
    """
    lines = [
        *caveat_of(rows, OF_COMPARISONS),
        "| work | run | s a step | tokens/s | process, GiB | ratio of tokens/s | of memory |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["work"], kind_of_rows(row)), []).append(row)
    for (name, kind), members in groups.items():
        of_work = sorted(members, key=lambda row: (row["run"].startswith("ours"), row["seconds"]))
        comparable = kind != CONSTANT and not of_work[0]["run"].startswith("ours")
        best = of_work[0] if comparable else None
        for index, row in enumerate(of_work):
            seconds, held = row["seconds"], row["process_bytes"]
            ratios = "|"
            if best is not None and row["run"].startswith("ours"):
                ratios = f"{best['seconds'] / seconds:.2f} | {held / best['process_bytes']:.2f}"
            numbers = f"{seconds:.2f} | {ROWS * TOKENS / seconds:,.0f} | {held / GIB:.1f}"
            lines.append(f"| {'' if index else f'{name}, {kind}'} | {row['run']} | {numbers} | {ratios} |")
    return [*lines, "", f"{rows[0]['hardware']}, {rows[0]['date']}. {rows[0]['libraries']}"]


def compared(name: str, settings: Sequence[Setting] | None, documents: Documents) -> list[str]:
    """Return a work's lines: the peer's fastest run that fits its GPU, ours, and the variants of ours.

    Settings with torch.compile are left out: a virtual GPU does not see it.
    """
    work = WORKS[name]
    fitting: dict[Setting, Result] = {}
    too_large: set[tuple[bool, str]] = set()
    for one in settings or work.peer.settings:  # fewer rows first
        if one.compiled:
            print(f"{name} {one}: left out, a virtual GPU does not see torch.compile", file=sys.stderr)
            continue
        if one.checkpoints and dataclasses.replace(one, checkpoints=False) in fitting:
            continue  # computes more
        kind = (one.checkpoints, one.head)
        options = ("--documents", name_of(documents))
        result = None if kind in too_large else _in_new_process(name, str(one), options)
        if result is not None and result.fits:
            fitting[one] = result
        else:
            too_large.add(kind)
    setting, best = min(fitting.items(), key=lambda pair: pair[1].seconds, default=(None, None))
    its = title_of(work, setting, documents) if setting else f"{work.peer.title}: no setting fits"
    return [
        _line(f"{work.recipe}, {work.gpu}", its, best),
        *(
            _line("", title_of(one, None, documents), ours(one, documents), than=best, goal=work.goal)
            for one in work.ours().values()
        ),
    ]


def _in_new_process(name: str, text: str, options: Sequence[str] = ()) -> Result | None:
    """Run a peer's program, or ours, in a process of its own; None: it fails, which is printed."""
    try:
        result = Result(**answer_of_new_process(__file__, [*options, "--in-this-process", name, text]))
    except RuntimeError as error:
        print(f"{name} {text}: {error}", file=sys.stderr)
        return None
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
