"""Models, techniques, trainers and engines, from the tries and tables that other pages keep."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from marked_table import table_of
from page_tables import several_gpus, trainers

from lowmem_ft.foundation.catalog.model_architectures import load_architectures
from lowmem_ft.foundation.knob import ENGINES
from lowmem_ft.recipe.trainers.trainer_kinds import ROWS, Refused, Verdict

TRIES = Path(__file__).parents[2] / "tests" / "data" / "families.json"
TECHNIQUES = ("plain", "lowest rung", "LoRA", "QLoRA", "packing", "FSDP2", "estimate")


def table() -> str:
    """Return a table of models, one of trainers and one of engines."""
    parts = [
        "## Models of the catalogue\n",
        table_of(("model", "parameters", "type", *TECHNIQUES), _models()),
        "\n## Techniques in trainers\n",
        table_of(("recipe key", "own loop", *trainers.alike()), _trainers()),
        "\n## Techniques on several GPUs\n",
        table_of(("technique", *ENGINES), _engines()),
    ]
    return "\n".join(parts) + "\n"


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
        yield f"`{row.key}`", "yes", *(_in_trainer(row.verdict(kind)) for kind in trainers.alike().values())


def _in_trainer(verdict: Verdict) -> str:
    if isinstance(verdict, Refused):
        return "refused"
    return "yes, if" if verdict.note or verdict.costs else "yes"


def _engines() -> Iterator[Sequence[str]]:
    for row in several_gpus.ROWS:
        cells = []
        for engine in ENGINES:
            is_shown = engine in row.proofs
            cells.append("refused" if row.refusal(engine) else "yes" if is_shown else "not shown")
        yield row.name, *cells
