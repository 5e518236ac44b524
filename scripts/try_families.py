"""Try each technique on a tiny model of every causal LM of transformers, and keep what came out.

    python scripts/try_families.py
    python scripts/try_families.py --only gemma4_text --only mamba --again
    python scripts/try_families.py --write

Results are kept in ``tests/data/families.json`` after each try; a try that is there is not repeated. ``--write`` brings
the table of ``docs/families.md`` up to date.
"""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import multiprocessing.connection
import re
import time
from collections.abc import Iterator
from pathlib import Path

import accelerate.utils  # noqa: F401  imported here once, and not in the process of each try
import marked_table
import transformers
import transformers.generation  # noqa: F401
from command_line import parser_of
from family_sweep.tries import TECHNIQUES, try_technique
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "families.md"
DATA = ROOT / "tests" / "data" / "families.json"
LIMIT_SECONDS = 300

SHARDED = "FSDP2"
"""A technique that takes half a minute a family."""
TRIED_SHARDED = (
    *(
        "llama",
        "gpt2",
        "granite",
        "gemma3_text",
        "gemma4_text",
        "mixtral",
        "qwen2_moe",
        "olmoe",
        "llama4_text",
    ),
    *("gpt_oss", "deepseek_v3", "deepseek_v4", "qwen3_next", "mamba", "falcon_h1", "nemotron_h"),
)
"""Types that differ in structure, which alone it is tried on."""

_NOT_CAUSAL = "refused: model.name_or_path needs a causal language model, whose"
_NAMES_AND_NUMBERS = re.compile(r"\w+(\.\w+)+ \(\w+\)|\w*[a-z][A-Z]\w*|[0-9.]+|\b[a-z]+_[a-z_]+|'\w+'")
"""Words that differ between two families that are refused for one reason."""

Results = dict[str, dict[str, str]]
"""The cell of each technique, by model type."""


def main() -> None:
    """Make the tries that are missing, or write the page."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", action="append", help="a model type; may be repeated (all)")
    parser.add_argument("--technique", action="append", choices=list(TECHNIQUES), help="a technique (all)")
    parser.add_argument("--again", action="store_true", help="repeat tries that are there")
    parser.add_argument("--failed", action="store_true", help="repeat those that failed or were wrong")
    parser.add_argument("--write", action="store_true", help="write docs/families.md, and try nothing")
    parser.add_argument("--data", type=Path, default=DATA, help=f"the results ({DATA.relative_to(ROOT)})")
    arguments = parser.parse_args()
    results: Results = json.loads(arguments.data.read_text()) if arguments.data.exists() else {}
    if arguments.write:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")
        return
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    gc.freeze()
    model_types = arguments.only or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    for number, model_type in enumerate(model_types, 1):
        row = results.setdefault(model_type, {})
        for technique in arguments.technique or techniques_for(model_type):
            before = row.get(technique, "")
            if before and not arguments.again and not (arguments.failed and is_wrong(before)):
                continue
            begin = time.perf_counter()
            row[technique] = in_a_process(model_type, technique)
            seconds = time.perf_counter() - begin
            print(
                f"{number}/{len(model_types)} {model_type}, {technique}: {row[technique]} ({seconds:.0f} s)",
                flush=True,
            )
            write(results, arguments.data)


def techniques_for(model_type: str) -> list[str]:
    """Return the techniques that are tried on a type."""
    return [name for name in TECHNIQUES if name != SHARDED or model_type in TRIED_SHARDED]


def write(results: Results, path: Path) -> None:
    """Write the results by model type, and in the order of the table's columns.

    Types that the installed transformers does not have, as another version does, keep their results.
    """
    ordered = {
        name: {technique: row[technique] for technique in TECHNIQUES if technique in row}
        for name, row in sorted(results.items())
    }
    path.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def is_wrong(cell: str) -> bool:
    """Return whether a cell says that something is left to fix."""
    return cell.startswith(("FAILED", "WRONG"))


def in_a_process(model_type: str, technique: str) -> str:
    """Make one try in a process of its own, which cannot leave anything behind for the next."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, model_type, technique))
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(LIMIT_SECONDS) else f"FAILED: no result in {LIMIT_SECONDS} s"
    except EOFError:
        return "FAILED: the process ended without a result"
    finally:
        process.kill()
        process.join()


def _send(sender: multiprocessing.connection.Connection, model_type: str, technique: str) -> None:
    sender.send(try_technique(model_type, technique))


def with_table(page: str, results: Results) -> str:
    """Return the page with the current table between its marks."""
    trained = {name: row for name, row in results.items() if not row["plain"].startswith(_NOT_CAUSAL)}
    rows = (
        (f"`{name}`", *(row.get(technique, "").partition(":")[0] for technique in TECHNIQUES))
        for name, row in sorted(trained.items())
    )
    encoders = ", ".join(f"`{name}`" for name in sorted(results.keys() - trained.keys()))
    lines = [
        marked_table.table_of(("model type", *TECHNIQUES), rows),
        "",
        f"Refused in every column, as their tokens see later ones: {encoders}.",
        "",
        *_reasons(trained),
    ]
    return marked_table.with_table(page, "try_families.py", "\n".join(lines) + "\n")


def _reasons(results: Results) -> Iterator[str]:
    """Yield a line for each reason of a refusal, with the families that it holds for and the first one's error."""
    families: dict[tuple[str, str], list[str]] = {}
    for name, row in sorted(results.items()):
        for technique, cell in row.items():
            if cell.startswith(("refused", "varies")):
                families.setdefault(
                    (technique, _NAMES_AND_NUMBERS.sub("", cell.replace(name, ""))), []
                ).append(name)
    for (technique, _), names in sorted(families.items()):
        message = " ".join(
            results[names[0]][technique].removeprefix("refused: ").removeprefix("varies: ").split()
        )
        yield f"- {technique}, {', '.join(f'`{name}`' for name in names)}: {message}"


if __name__ == "__main__":
    main()
