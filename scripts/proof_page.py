"""Write ``docs/proof.md``, ``docs/proof.svg`` and a sentence of the README: predictions next to measurements.

    python scripts/proof_page.py

Nothing is measured or estimated here: the numbers are those that the scripts named in the page keep. The formulas of
others are computed for each row (``scripts/proof/formulas.py``).
"""

from __future__ import annotations

import json
import statistics
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import marked_table
from calibrate.ranges import ESTIMATES, held_when_left_out, measured_runs, public_rows
from command_line import parser_of
from kill_processes import RESULTS as KILLS
from measuring.constant_rows import caveat_of_recipes
from proof.formulas import FORMULAS
from proof.picture import Panel, proof_svg
from proof.rows import Pair, ProofRow, load_proof_rows

from lowmem_ft.foundation.catalog.gpu_catalog import CPU, load_gpus
from lowmem_ft.foundation.units import GIB
from lowmem_ft.recipe.shipped.needs import needs_of_shipped_recipes

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "proof.md"
README = ROOT / "README.md"
PICTURE = PAGE.with_suffix(".svg")

TICKS_OF_MEMORY = (0.5, 2, 8, 32, 128)
TICKS_OF_SECONDS = (0.04, 0.4, 4, 40)


def page_of(rows: Sequence[ProofRow]) -> str:
    """Return the page."""
    return "\n\n".join(_parts(rows)) + "\n"


def _parts(rows: Sequence[ProofRow]) -> Iterator[str]:
    misses = [row for row in rows if not row.is_hit]
    num_memory = sum(row.memory is not None for row in rows)
    num_seconds = sum(row.seconds is not None for row in rows)
    num_own = sum(row.name.startswith("recipe ") for row in rows)
    yield "<!-- written by scripts/proof_page.py -->\n# Predicted against measured"
    if caveat := caveat_of_recipes():
        yield "\n".join(caveat).rstrip()
    yield _wrapped(
        f"{len(rows)} runs on GPUs: {num_memory} with their memory, {num_seconds} with the seconds of a step. Others "
        f"measured and published {len(rows) - num_own} of them; {num_own} are recipes of this project on two H200. "
        "`python scripts/proof_page.py` writes this page. It measures nothing: the last column of the tables names the "
        "script that predicts a row again on a machine without a GPU."
    )
    yield "![Predicted against measured memory and seconds](proof.svg)"
    yield "Both axes are logarithmic; a number beyond an end is drawn at that end."
    yield "## Each predictor"
    yield _wrapped(
        "Memory is what the caching allocator reserves (of the mixtures, what is allocated). *Too low by more than "
        "6%* is the error that costs: a run that was promised to fit, and does not."
    )
    yield marked_table.table_of(
        ("predictor", "rows it answers", "median error", "largest", "too low by more than 6%"),
        _predictors(rows),
        numbers=range(1, 5),
    )
    yield _wrapped(
        "In fairness: `accelerate` and the ZeRO rules count every parameter as trained, and are asked of full "
        "fine-tuning on the GPU alone. They know no rows and leave activations out; they count AdamW's state in "
        "float32, which the recipes among these runs keep in 8 bits, and the gradients, which `8b-bf16` frees as they "
        "come. Unsloth's table states minima, of its own kernels, which "
        "these runs do not use: that it is lower is no error of it. FitCheck's shares on a T4 were fitted by its "
        "author to runs among these rows; this project's *ranges* were fitted to these rows, too, and its memory "
        "figures to one of them (the length of a batch that was not published). Seconds are predicted with "
        "all rows of a row's publisher left out of the fit (where one publisher has all of an architecture, all of the "
        "day), on the host that every estimate assumes ([the clock](clock.md))."
    )
    yield _held()
    yield f"## Misses: {len(misses)} of {len(rows)}"
    yield "A number outside the range that the estimate prints is a miss, on either side."
    yield _table_of(misses)
    yield "## Every row within its range"
    yield "The largest error comes first."
    yield _table_of([row for row in rows if row.is_hit])
    yield "## The rules"
    yield marked_table.table_of(
        ("column", "rule", "source"), ((rule.title, rule.words, rule.source) for rule in FORMULAS)
    )
    yield _left_out()
    yield "## Never measured"
    yield _never_measured(rows)
    yield "## Does it learn the same?"
    yield _wrapped(
        "In 30 runs of 200 steps (two tasks, three seeds), no number format of the memory ladder differs from float32 "
        "by more than float32's seeds do: [learning curves](learning_curves.md) has the losses."
    )
    yield "## Kills survived"
    yield _wrapped(
        "A process of a run is killed at a random moment, the run resumed to its end, and losses, norms, weights, "
        "optimizer state and files compared with those of a run that no one disturbed. All of it is on CPUs, several "
        "processes a run."
    )
    yield marked_table.table_of(
        ("command", "day", "kills", "in", "left a folder half written", "runs", "ends that differed"),
        _kills(),
    )


def _predictors(rows: Sequence[ProofRow]) -> Iterator[tuple[str, ...]]:
    with_memory = [row for row in rows if row.memory is not None]
    yield _predictor("**lowmem_ft, memory**", [pair.error for pair in _pairs(with_memory)])
    for rule in FORMULAS:
        answered = [row for row in with_memory if rule.title in row.formulas]
        errors = [
            row.formulas[rule.title] / pair.measured - 1
            for row, pair in zip(answered, _pairs(answered), strict=True)
        ]
        cells = _predictor(f"{rule.title}, memory", errors)
        yield (*cells[:-1], "") if rule.is_minimum else cells
    seconds = [row.seconds.error for row in rows if row.seconds is not None]
    yield *_predictor("**lowmem_ft, seconds**", seconds)[:-1], ""


def _pairs(rows: Iterable[ProofRow]) -> list[Pair]:
    return [row.memory for row in rows if row.memory is not None]


def _predictor(title: str, errors: Sequence[float]) -> tuple[str, ...]:
    worst = max(errors, key=abs)
    low = sum(error < -0.06 for error in errors)
    return title, str(len(errors)), f"{statistics.median(map(abs, errors)):.1%}", f"{worst:+.0%}", str(low)


def _held() -> str:
    runs = measured_runs()
    unseen, tried = held_when_left_out(runs, lambda run: run.source)
    alone, _ = held_when_left_out(runs, lambda run: run.name)
    return _wrapped(
        f"A range of memory that was fitted without a run holds that run in {alone} of {tried} cases; fitted without "
        f"any run of its source, in {unseen} of {tried} (`python scripts/calibrate ranges`)."
    )


def _table_of(rows: Sequence[ProofRow]) -> str:
    heads = ("run", "GPU", "GiB", "predicted", "error", "s a step", "predicted", "error")
    return marked_table.table_of(
        (*heads, *(rule.title for rule in FORMULAS), "differs, or left open", "by"),
        (
            (
                f"[{row.name}]({row.url})",
                row.gpu,
                *_cells(row.memory, lambda num_bytes: f"{num_bytes / GIB:.2f}"),
                *_cells(row.seconds, lambda seconds: f"{seconds:.3g}"),
                *(_by_rule(row, rule.title) for rule in FORMULAS),
                row.note,
                f"`{row.script}`",
            )
            for row in rows
        ),
        numbers=range(2, 8 + len(FORMULAS)),
    )


def _cells(pair: Pair | None, words: Callable[[float], str]) -> tuple[str, str, str]:
    if pair is None:
        return "", "", ""
    error = f"{pair.error:+.1%}" if pair.is_hit else f"**{pair.error:+.1%}**"
    return words(pair.measured), f"{words(pair.predicted)} ({words(pair.low)} to {words(pair.high)})", error


def _by_rule(row: ProofRow, title: str) -> str:
    if row.memory is None or title not in row.formulas:
        return ""
    num_bytes = row.formulas[title]
    return f"{num_bytes / GIB:.3g} ({num_bytes / row.memory.measured - 1:+.0%})"


def _left_out() -> str:
    kept = json.loads(ESTIMATES.read_text("utf-8"))
    left = [row for row in public_rows() if row["name"] not in kept]
    versions = ", ".join(sorted({row["versions"]["transformers"] for row in left}))
    return _wrapped(
        f"**Memory left out:** {len(left)} runs of 4-bit models under transformers {versions}, which puts weights on "
        "the GPU faster than they are quantised: what is reserved then differs from run to run. Their seconds are "
        "above. [The clock](clock.md) lists published seconds that no row predicts, and why."
    )


def _never_measured(rows: Sequence[ProofRow]) -> str:
    seen_memory = {row.gpu for row in rows if row.memory is not None}
    seen_seconds = {row.gpu for row in rows if row.seconds is not None}
    gpus = list(load_gpus())
    run = {row.name.split()[1] for row in rows if row.name.startswith("recipe ")}
    recipes = [
        name for name, needs in needs_of_shipped_recipes().items() if needs.gpu != CPU and name not in run
    ]
    lines = [
        f"- Memory on {_listed(gpu for gpu in gpus if gpu not in seen_memory)}.",
        f"- Seconds on {_listed(gpu for gpu in gpus if gpu not in seen_seconds)}.",
        f"- The recipes {_listed(f'`{name}`' for name in recipes)} on a real GPU.",
        "- Several GPUs: FSDP2, DDP and DeepSpeed have run as processes on CPUs and, the first two, on virtual GPUs.",
        "- A run of hours on a GPU: the longest has three steps. Runs on CPUs have 60 steps and more.",
        "- The mixtures' rows were measured with another training loop; no recipe with experts has run on a GPU.",
        "- Context and driver versions other than those of the rows.",
    ]
    return "\n".join(_wrapped(line, "  ") for line in lines)


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _listed(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def _kills() -> Iterator[tuple[str, ...]]:
    for row in json.loads(KILLS.read_text("utf-8")):
        phases = ", ".join(f"{phase} {count}" for phase, count in Counter(row["by_phase"]).most_common())
        numbers = map(str, (row["kills"], phases, row["left_a_folder_half_written"], row["runs"]))
        yield f"`{row['command']}`", row["date"], *numbers, _problems(row)


def _problems(row: Mapping[str, Any]) -> str:
    fixed = f" ({row['fixed']})" if "fixed" in row else ""
    return f"{'; '.join(row['problems'])}{fixed}" if row["problems"] else "none"


def readme_with_summary(text: str, rows: Sequence[ProofRow]) -> str:
    """Return the README with its sentence on accuracy as the rows have it."""
    memory = [abs(pair.error) for pair in _pairs(rows)]
    seconds = [abs(row.seconds.error) for row in rows if row.seconds is not None]
    num_misses = sum(not row.is_hit for row in rows)
    words = (
        f"Against {len(rows)} runs measured on GPUs, the median error of an estimate is "
        f"{statistics.median(memory):.1%} in memory ({len(memory)} runs) and {statistics.median(seconds):.1%} in "
        f"seconds ({len(seconds)}, with their source left out of the fit); {num_misses} runs are outside the range "
        "that it gives. [Every row, misses first](docs/proof.md), with other people's rules of thumb on the same runs "
        "(`python scripts/proof_page.py`):"
    )
    return marked_table.with_table(text, Path(__file__).name, f"{_wrapped(words)}\n")


def picture_of(rows: Sequence[ProofRow]) -> str:
    """Return the picture."""
    with_memory = [(row, row.memory) for row in rows if row.memory is not None]
    by_rules = [
        (pair.measured / GIB, num_bytes / GIB)
        for row, pair in with_memory
        for num_bytes in row.formulas.values()
    ]
    return proof_svg(
        Panel(
            title="memory, GiB",
            ours=[(pair.measured / GIB, pair.predicted / GIB) for _, pair in with_memory],
            rules=by_rules,
            ticks=TICKS_OF_MEMORY,
        ),
        Panel(
            title="step, seconds",
            ours=[(row.seconds.measured, row.seconds.predicted) for row in rows if row.seconds is not None],
            rules=[],
            ticks=TICKS_OF_SECONDS,
        ),
    )


def main() -> None:
    """Write page and picture."""
    parser_of(__doc__).parse_args()
    rows = load_proof_rows()
    PAGE.write_text(page_of(rows), "utf-8")
    README.write_text(readme_with_summary(README.read_text("utf-8"), rows), "utf-8")
    PICTURE.write_text(picture_of(rows), "utf-8")


if __name__ == "__main__":
    main()
