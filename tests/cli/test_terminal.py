"""What a terminal of 80 columns shows: nothing that is to be typed or copied is cut or broken."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
import shlex
import sys
from pathlib import Path

import pytest
from rich.console import Console

from lowmem_ft.cli import COMMANDS, main
from lowmem_ft.cli.console.logs import _TerminalHandler, set_up_logging
from lowmem_ft.data.files.reading import Source
from lowmem_ft.foundation.catalog.gpu_catalog import load_gpus
from lowmem_ft.foundation.catalog.model_architectures import load_architectures
from lowmem_ft.recipe import load_recipe, shipped_recipes

COLUMNS = 80


@pytest.fixture
def shown(monkeypatch, capsys):
    """The lines that a command writes on a terminal."""

    def run(command: str, columns: int = COLUMNS) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        with contextlib.suppress(SystemExit):  # argparse leaves by itself
            assert main(shlex.split(command)) == 0
        return [line.rstrip() for line in re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()]

    return run


@pytest.fixture
def runs(tmp_path) -> list[str]:
    """Folders of three runs, whose values take more than 80 columns beside each other."""
    names = ["8b-24gb-all-of-it", "8b-16gb-half-of-it", "8b-8gb-streamed"]
    for number, name in enumerate(names, start=1):
        peaks = {
            "peak_bytes": number * 10 * 2**30,
            "host_peak_bytes": 2**30,
            "reserved_bytes": number * 11 * 2**30,
            "by_phase": {"load": 5 * 2**30, "step": 10 * 2**30},
            "by_category": {"parameter": 4 * 2**30},
            "step_seconds": 2.0,
        }
        folder = tmp_path / name
        folder.mkdir()
        (folder / "recipe.yaml").write_text(f"name: {name}\nmodel: {{name_or_path: some/model}}\n")
        records = [
            {"step": 0, "estimated": peaks},
            {"step": 1, "measured": {**peaks, "peak_bytes": 9 * 2**30}},
        ]
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return [str(tmp_path / name) for name in names]


NAMES = {
    "gpus": [*load_gpus()],
    "gpus rtx-pro-6000-blackwell": ["rtx-pro-6000-blackwell"],
    "models": [name for model in load_architectures().values() for name in (model.name, model.hub_id)],
    "models mistral-small-24b": ["mistralai/Mistral-Small-24B-Base-2501"],
    "recipes": [*shipped_recipes()],
}


@pytest.mark.parametrize("command", NAMES)
def test_no_name_is_cut(shown, command):
    lines = shown(command)
    assert {*NAMES[command]} <= {*" ".join(lines).split()}
    for line in lines:
        is_one_word = len(line.split()) == 1  # an address, which goes beyond rather than breaks
        assert len(line) <= COLUMNS or is_one_word, line


def test_columns_that_find_no_room_are_named_and_the_others_are_whole(shown):
    lines = shown("models")
    assert lines[0].split() == ["model", "parameters", "hub", "id"]
    assert "Not shown in 80 columns: licence, vocabulary, hidden, layers, gated." in " ".join(lines)
    assert shown("models", columns=200)[0].split()[2:5] == ["layers", "hidden", "vocabulary"]
    lines = shown("gpus")
    assert lines[0].split()[-2:] == ["$/h", "from"]
    assert [line.split()[0] for line in lines[1 : len(load_gpus()) + 1]] == [*load_gpus()]
    assert "columns: at, offers." in lines[len(load_gpus()) + 2]


def test_runs_that_find_no_room_beside_each_other_stand_below(shown, runs):
    lines = shown(f"report {' '.join(map(shlex.quote, runs))}")
    assert max(map(len, lines)) <= COLUMNS
    words = " ".join(lines)
    for value in (
        "8b-24gb-all-of-it",
        "8b-16gb-half-of-it",
        "8b-8gb-streamed",
        "30.0 GiB / 9.00 GiB",
        "+233.3%",
    ):
        assert value in words
    assert sum(line.startswith("peak of tensors") for line in lines) == 2
    wide = shown(f"report {' '.join(map(shlex.quote, runs))}", columns=120)
    assert sum(line.startswith("peak of tensors") for line in wide) == 1


def test_a_command_in_a_log_line_stays_on_one_line():
    written = io.StringIO()
    handler = _TerminalHandler(
        console=Console(file=written, width=COLUMNS, force_terminal=True, color_system=None)
    )
    told = (
        "The adapter is in runs/7b-lora/model; `lowmem-ft merge runs/7b-lora/model OUT_DIR` merges it into the base "
        "model."
    )
    handler.emit(logging.makeLogRecord({"levelname": "INFO", "levelno": logging.INFO, "msg": told}))
    assert "`lowmem-ft merge runs/7b-lora/model OUT_DIR`" in written.getvalue()
    assert max(map(len, written.getvalue().splitlines())) <= COLUMNS


@pytest.mark.parametrize("length", [45, 75, 200])
@pytest.mark.parametrize("told", ["{}", "Format of {}: text (the only column).", "The model is in {}"])
def test_a_path_in_a_log_line_is_never_cut(told, length):
    """Begun by itself where it is wider than the column of messages; wider than the terminal, it goes beyond."""
    written = io.StringIO()
    console = Console(file=written, width=COLUMNS, force_terminal=True, color_system=None)
    path = f"/home/somebody/{'a-long-name/' * 20}"[:length]
    _TerminalHandler(console=console).handle(logging.makeLogRecord({"msg": told.format(path)}))
    lines = written.getvalue().splitlines()
    assert sum(path in line for line in lines) == 1
    assert max(map(len, lines)) <= max(COLUMNS, length + len(":"))
    assert " ".join(written.getvalue().split()).endswith(told.format(path))


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_log_line_makes_no_terminal_obey(is_terminal, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR" if is_terminal else "NO_COLOR", "1")
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    set_up_logging()
    logging.getLogger("lowmem_ft").info("New tokens: %s", "\x1b]0;x\x07 ⟦learnt⟧")
    said = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().err)  # without the colours, which are ours
    assert r"New tokens: \x1b]0;x\x07 ⟦learnt⟧" in said
    assert "\x07" not in said


def test_the_data_of_a_shipped_recipe_is_shown_without_the_folder_of_pythons_libraries(tmp_path):
    path = load_recipe("tiny").data.path
    assert path is not None
    assert Path(path).is_file()
    assert str(Source(path=path)) == "lowmem_ft/recipes/tiny/data.jsonl (train)"
    assert str(Source(path=str(tmp_path / "my.jsonl"))) == f"{tmp_path}/my.jsonl (train)"


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_breaks_no_word(shown, command):
    def words(columns: int) -> set[str]:
        text = "\n".join(shown(f"{command} --help", columns))
        commands = re.findall(r"`[^`]*`", text)
        assert not [command for command in commands if "\n" in command]
        return {*text.split()} - {"\\"}

    assert words(60) <= words(400)
