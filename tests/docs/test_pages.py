"""Pages say what the code says, and what the tables behind them name is there."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pages
import pytest
from page_tables import python_api, several_gpus
from trained_by_processes import CASES

import lowmem_ft
from lowmem_ft.foundation.knob import ENGINES
from lowmem_ft.recipe.reading.keys import recipe_keys
from lowmem_ft.recipe.trainers.trainer_kinds import ROWS

ROOT = Path(__file__).parents[2]
NO_TECHNIQUES = {
    "checkpointing.every_n_layers": "checkpointing.mode",
    "checkpointing.skip_last_layers": "checkpointing.mode",
    "offload.resident_layers": "offload.parameters",
    "offload.folder": "offload.parameters",
    "model.dtype": "the model's own",
    "data.max_length": "the trainer's own",
    "training.per_device_train_batch_size": "the trainer's own",
    "training.gradient_accumulation_steps": "the trainer's own",
    "training.mixed_precision": "the trainer's own",
    "distributed.strategy": "the launcher's",
    "distributed.reshard_after_forward": "the launcher's",
    "distributed.cpu_offload": "the launcher's",
    "distributed.sync_each_batch": "the launcher's",
}
"""Memory knobs that are no technique of their own in a trainer, and whose they are."""


@pytest.mark.parametrize("name", pages.TABLES)
def test_a_page_is_what_the_code_says(name):
    page = (pages.DOCS / f"{name}.md").read_text(encoding="utf-8")
    assert pages.up_to_date(name, page) == page, f"run `python scripts/pages.py {name}`"
    for table in re.findall(r"(?:^\|.*\n)+", page, re.M):
        widths = {len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}
        assert len(widths) == 1, f"rows with more cells than others:\n{table[:200]}"


def test_a_page_that_differs_is_told_and_written(monkeypatch, tmp_path, capsys):
    page = tmp_path / "trainers.md"
    page.write_text("<!-- written by scripts/pages.py trainers -->\nold\n<!-- end of the table -->\n")
    monkeypatch.setattr(pages, "DOCS", tmp_path)

    def ends_with(*words):
        monkeypatch.setattr(sys, "argv", ["pages.py", "trainers", *words])
        return pages.main()

    assert ends_with("--check") == 1
    assert "python scripts/pages.py trainers" in capsys.readouterr().out
    assert "\nold\n" in page.read_text()
    assert ends_with() == 0
    assert "\nold\n" not in page.read_text()
    assert ends_with("--check") == 0


def test_every_published_name_exists_and_says_what_it_is():
    modules = python_api.published()
    assert importlib.import_module("lowmem_ft.techniques.streaming.parameter_streaming") in modules
    names = [(module, name) for module in modules for name in module.__all__]
    assert len(names) > 80
    assert [f"{module.__name__}.{name}" for module, name in names if not hasattr(module, name)] == []
    assert [
        f"{module.__name__}.{name}" for module, name in names if not python_api.summary(getattr(module, name))
    ] == []


def test_a_verb_that_enables_a_technique_is_published_and_shown_in_a_bare_loop():
    techniques = Path(lowmem_ft.__file__).parent / "techniques"
    verbs = {
        verb
        for file in techniques.rglob("*.py")
        for verb in re.findall(r"^def (enable_\w+)", file.read_text(), re.M)
    }
    assert len(verbs) > 10
    assert verbs - {name for module in python_api.published() for name in module.__all__} == set()
    shown = (pages.DOCS / "techniques_alone.md").read_text(encoding="utf-8")
    assert [verb for verb in sorted(verbs) if f"{verb}(" not in shown] == []


def test_every_memory_knob_is_in_the_table_of_trainers():
    knobs = {path for path, key in recipe_keys().items() if key.effects is not None}
    assert knobs - {row.key for row in ROWS} == NO_TECHNIQUES.keys()


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_named_as_proof_of_an_engine_is_there(engine):
    file = several_gpus.TESTS[engine]
    source = (ROOT / file).read_text(encoding="utf-8")
    assert file in (pages.DOCS / "several_gpus.md").read_text(encoding="utf-8")
    for row in several_gpus.ROWS:
        proof = row.proofs.get(engine, several_gpus.TRACE)
        if proof != several_gpus.TRACE:
            assert "OF_ENGINES[" in source
            assert f'"{engine}"' in source
            settings = CASES[engine][proof][0].split()
            ours = [word for word in row.settings.split() if not _is_of_every_case(word)]
            assert set(ours) <= set(settings), f"{proof} does not show {row.name}"


def _is_of_every_case(setting):
    """The recipe that all cases go by says so itself."""
    return setting in ("checkpointing.mode=full", "loss.chunk_tokens=64")


@pytest.mark.parametrize("row", several_gpus.ROWS, ids=lambda row: row.name)
def test_a_row_shows_nothing_with_an_engine_that_refuses_it_and_says_why(row):
    refusals = {engine: said for engine in ENGINES if (said := row.refusal(engine)) is not None}
    assert not refusals.keys() & row.proofs.keys()
    assert bool(row.why) == any(not several_gpus.is_for_want_of_proof(said) for said in refusals.values())
