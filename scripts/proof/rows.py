"""Every run that is predicted and was measured on a GPU, from the files and tables that other scripts keep."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from calibrate.ranges import ESTIMATES, public_rows
from clock_against_public import load_without_publishers
from marked_table import cells_of
from measuring.public_seconds import SecondsRow, load_rows, measured_rows
from mixtures_against_public import COMMON as COMMON_OF_MIXTURES
from mixtures_against_public import RUNS as MIXTURES
from proof.formulas import FORMULAS, PEFT_TARGETS, Settings

from lowmem_ft.foundation.catalog.model_architectures import Architecture, find_architecture
from lowmem_ft.foundation.memory.uncertainty import QUANTIZED_RESERVED_SHARE, RESERVED_SHARE
from lowmem_ft.foundation.units import GIB
from lowmem_ft.recipe import load_recipe
from lowmem_ft.techniques.offload.config import OffloadConfig

DOCS = Path(__file__).resolve().parents[2] / "docs"

Json = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A prediction and a measurement.

    Args:
        predicted: bytes or seconds.
        measured: the same.
        low: lower end of the range that an estimate prints.
        high: its upper end.
    """

    predicted: float
    measured: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured - 1

    @property
    def is_hit(self) -> bool:
        """True if the measurement is within the range."""
        return self.low <= self.measured <= self.high


@dataclass(frozen=True, kw_only=True)
class ProofRow:
    """A run.

    Args:
        name: its name here.
        url: where it was published, or the file of this repository that has it.
        gpu: name in the catalogue; ``like`` before it where a GPU of its kind was measured.
        script: the script that predicts its memory, or its seconds where it has no memory.
        memory: bytes; None: not measured, or not predicted.
        what: the bytes that ``memory`` compares: ``reserved`` or ``allocated``.
        seconds: seconds of an optimizer step.
        formulas: bytes by each formula's title; without those that have no answer.
        note: what is known to differ between the program that was measured and the one that is predicted.
    """

    name: str
    url: str
    gpu: str
    script: str
    memory: Pair | None = None
    what: str = "reserved"
    seconds: Pair | None = None
    formulas: Mapping[str, float]
    note: str = ""

    @property
    def pairs(self) -> list[Pair]:
        """Both comparisons, as far as there are any."""
        return [pair for pair in (self.memory, self.seconds) if pair is not None]

    @property
    def is_hit(self) -> bool:
        """True if everything measured is within its range."""
        return all(pair.is_hit for pair in self.pairs)

    @property
    def worst(self) -> float:
        """The largest relative error."""
        return max(abs(pair.error) for pair in self.pairs)


def load_proof_rows() -> list[ProofRow]:
    """Return all rows: misses first, the largest error first in each half."""
    rows = {row.name: row for row in (*_public_memory(), *_recipes(), *_mixtures())}
    for timed in (*load_rows(), *measured_rows()):
        row = rows.get(timed.name)
        pair = _seconds(timed)
        if row is not None:
            rows[timed.name] = replace(row, seconds=pair, note=row.note or _note(timed))
        else:
            rows[timed.name] = ProofRow(
                name=timed.name,
                url=timed.url,
                gpu=timed.gpu,
                script="clock_against_public.py",
                seconds=pair,
                formulas={},
                note=_note(timed),
            )
    return sorted(rows.values(), key=lambda row: (row.is_hit, -row.worst, row.name))


def _note(row: SecondsRow) -> str:
    other = "" if row.program in ("the same loop", "the recipe itself") else row.program
    return "; ".join(
        words for words in (other, "held out of the fit" if row.held_out else "", *row.open) if words
    )


def _seconds(row: SecondsRow) -> Pair:
    """Return what an estimate would say had the row's publisher published nothing."""
    low, predicted, high = load_without_publishers()[row.name]
    return Pair(predicted=predicted, measured=row.seconds, low=low, high=high)


def _bytes(predicted: float, measured: float, share: float) -> Pair:
    return Pair(
        predicted=predicted,
        measured=measured,
        low=predicted * (1 - share),
        high=predicted * (1 + share),
    )


def _by_formulas(model: Architecture, settings: Settings, titles: Sequence[str] = ()) -> dict[str, float]:
    answers = {formula.title: formula.num_bytes(model, settings) for formula in FORMULAS}
    return {
        title: answer
        for title, answer in answers.items()
        if answer is not None and (not titles or title in titles)
    }


def _architecture(name: str) -> Architecture:
    found = find_architecture(name)
    assert found is not None, f"the catalogue has no {name}"
    return found


def _public_memory() -> Iterator[ProofRow]:
    estimates = json.loads(ESTIMATES.read_text(encoding="utf-8"))
    for row in public_rows():
        estimate, source = estimates.get(row["name"]), row["source"]
        if estimate is None:  # what its transformers reserves is random; docs/proof.md says so
            continue
        settings = settings_of(row)
        share = QUANTIZED_RESERVED_SHARE if settings.bits == 4 else RESERVED_SHARE
        yield ProofRow(
            name=row["name"],
            url=f"https://github.com/{source['repository']}/blob/{source['commit']}/{source['file']}",
            gpu=row["gpu"],
            script="calibrate ranges",
            memory=_bytes(estimate["reserved"], row["measured"]["reserved"], share),
            formulas=_by_formulas(_architecture(row["settings"]["model"]), settings),
            note="its batch's length was chosen by this row" if "fitted" in row else "",
        )


def settings_of(row: Json) -> Settings:
    """Return what the formulas ask of a row of ``public-*.json``."""
    fields, adapter = row["settings"], row["settings"].get("adapter") or {}
    quantization = fields.get("quantization", "none")
    kind = {None: "full", "LORA": "lora"}.get(adapter.get("peft_type"), "other adapter")
    lora = adapter if kind == "lora" else {}
    return Settings(
        gpu=row["gpu"],
        method=kind,
        bits=16 if quantization == "none" else 4,
        rank=lora["r"] if lora else 0,
        targets=tuple(lora.get("target_modules", PEFT_TARGETS)) if lora else (),
        rows=fields["batch_size"],
        length=fields["length"],
        checkpointing=fields.get("checkpointing", "full") == "full",
        eager=fields["attention"] == "eager",
        adam_bytes=2 if fields.get("optimizer") == "paged-adamw-8bit" else 8,
        double_quant=quantization == "nf4-double",
    )


BY_PARAMETERS = ("accelerate", "ZeRO-2", "ZeRO-3", "Unsloth")
"""Formulas that ask for a model and a method alone. FitCheck cannot say what recipes set, nor experts."""


def _recipes() -> Iterator[ProofRow]:
    """Yield the runs of recipes on an H200; their table has what each was estimated to reserve."""
    for cells in cells_of((DOCS / "benchmarks.md").read_text("utf-8"), "measure_memory.py"):
        run, day, reserved, error = cells[0].strip("`"), cells[1], float(cells[4]), _share(cells[5])
        recipe = load_recipe(run.split()[0], run.split()[1:])
        share = RESERVED_SHARE if recipe.model.quantization == "none" else QUANTIZED_RESERVED_SHARE
        yield ProofRow(
            name=f"recipe {run} 2026-{day}",
            url="../tests/data/measured/measured-cuda.json",
            gpu="h200",
            script="measure_memory.py --write",
            memory=_bytes(reserved * (1 + error) * GIB, reserved * GIB, share),
            formulas=_of_recipe(recipe),
        )


def _mixtures() -> Iterator[ProofRow]:
    """Yield the published runs of mixtures; their table has what each was estimated to allocate."""
    published = {run.name: run for run in MIXTURES}
    for cells in cells_of((DOCS / "estimating.md").read_text("utf-8"), "mixtures_against_public.py"):
        run = published[cells[0]]
        recipe = load_recipe(None, [*COMMON_OF_MIXTURES, *run.settings])
        share = RESERVED_SHARE if recipe.model.quantization == "none" else QUANTIZED_RESERVED_SHARE
        yield ProofRow(
            name=run.name,
            url="https://github.com/pjordanandrsn/experts4bit-qlora",
            gpu=f"like {run.gpu}",
            script="mixtures_against_public.py",
            memory=_bytes(float(cells[2]) * 1e9, run.gigabytes * 1e9, share),
            what="allocated",
            formulas=_of_recipe(recipe),
            note=run.otherwise,
        )


def _of_recipe(recipe: Any) -> dict[str, float]:
    if recipe.offload != OffloadConfig():  # the rules count what a GPU holds with nothing on the host
        return {}
    settings = Settings(
        gpu="",
        method="full" if recipe.adapter.name == "none" else "lora",
        bits={"none": 16, "nf4": 4, "int8": 8}[recipe.model.quantization],
        rank=recipe.adapter.r,
        targets=(),
        rows=recipe.training.per_device_train_batch_size,
        length=recipe.data.max_length,
        checkpointing=recipe.checkpointing.mode != "none",
        eager=False,
        adam_bytes=8,
        double_quant=False,
    )
    return _by_formulas(_architecture(recipe.model.name_or_path), settings, BY_PARAMETERS)


def _share(percent: str) -> float:
    return float(percent.rstrip("%")) / 100
