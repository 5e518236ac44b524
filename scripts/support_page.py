"""Write ``docs/support.md``: models, techniques, trainers and engines, from the tries and tables that other pages keep.

    python scripts/support_page.py

Run it after ``try_families.py --write``, ``trainer_table.py`` or ``engine_table.py``; a test compares.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import engine_table
import marked_table
from command_line import rewrite_page

from lowmem_ft.catalog.architectures import load_architectures
from lowmem_ft.foundation.knob import ENGINES
from lowmem_ft.hf.trainers.trainer_kinds import KINDS, ROWS, Refused, Verdict

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "support.md"
TRIES = ROOT / "tests" / "data" / "families.json"
TECHNIQUES = ("plain", "lowest rung", "LoRA", "QLoRA", "packing", "FSDP2", "estimate")


def with_tables(page: str) -> str:
    """Return a page with the present tables between its marks."""
    parts = [
        "## Models of the catalogue\n",
        marked_table.table_of(("model", "parameters", "type", *TECHNIQUES), _models()),
        "\n## Techniques in trainers\n",
        marked_table.table_of(("recipe key", "own loop", *KINDS), _trainers()),
        "\n## Techniques on several GPUs\n",
        marked_table.table_of(("technique", *ENGINES), _engines()),
    ]
    return marked_table.with_table(page, Path(__file__).name, "\n".join(parts) + "\n")


def _models() -> Iterator[Sequence[str]]:
    tries = json.loads(TRIES.read_text(encoding="utf-8"))
    for model in load_architectures().values():
        kind = model.text_config["model_type"]
        found = tries[kind]
        yield (
            f"`{model.name}`",
            f"{model.num_parameters / 1e9:.2f}B",
            f"`{kind}`",
            *(_verdict(found.get(technique)) for technique in TECHNIQUES),
        )


def _verdict(found: str | None) -> str:
    if found is None:
        return "not tried"
    return next((word for word in ("refused", "varies") if found.startswith(word)), "yes")


def _trainers() -> Iterator[Sequence[str]]:
    for row in ROWS:
        yield f"`{row.key}`", "yes", *(_in_trainer(row.verdict(kind)) for kind in KINDS)


def _in_trainer(verdict: Verdict) -> str:
    if isinstance(verdict, Refused):
        return "refused"
    return "yes, if" if verdict.note or verdict.costs else "yes"


def _engines() -> Iterator[Sequence[str]]:
    for row in engine_table.ROWS:
        cells = []
        for engine in ENGINES:
            is_shown = engine in row.proofs
            cells.append("refused" if row.refusal(engine) else "yes" if is_shown else "not shown")
        yield row.name, *cells


if __name__ == "__main__":
    rewrite_page(__doc__, PAGE, with_tables)
