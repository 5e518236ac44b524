"""Everything a user may get wrong, as one table: command, exit code, words that must be said, never a traceback.

The rows stand in ``bad_inputs/*.yaml``, by command, each as ``[exit code, words ...]``; the files that they name are
made by the fixture ``bad_files``. Exit code 2 says ``error:``; with 0 a run lives with the input and warns; with 3
it does not fit. A row that fails shows what was said.

A command runs where neither torch, transformers nor accelerate can be imported, which takes seconds, unless its row is
``!late``: a tokenizer, a model that is built, or what this machine has, had to be looked at first.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import pathlib
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from processes import LIMIT_SECONDS

from lowmem_ft.cli import main

TABLE = sorted((Path(__file__).parent / "bad_inputs").glob("*.yaml"))


def _rows() -> list[Any]:
    tables = {path: yaml.load(path.read_text(encoding="utf-8"), _Loader) for path in TABLE}
    return [
        pytest.param(
            *(f"bad_inputs/{path.name}", command, row[0], row[1:], isinstance(row, _Late)),
            id=f"{path.stem}: {command}",
        )
        for path, table in tables.items()
        for command, row in table.items()
    ]


class _Late(list[Any]):
    """A row that needs torch."""


class _Loader(yaml.SafeLoader):
    """Refuses a command that stands there twice, of which YAML would take the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        assert len(set(keys)) == len(keys), sorted(key for key in keys if keys.count(key) > 1)
        return super().construct_mapping(node, deep)


_Loader.add_constructor("!late", lambda loader, node: _Late(loader.construct_sequence(node)))

ROWS = _rows()

WITHOUT_TORCH = """
import json, os, pathlib, signal, sys, tempfile, traceback
import datasets, pyarrow.parquet
from lowmem_ft.cli import main

class ImportedTooEarly(BaseException):
    pass

class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "transformers", "accelerate"):
            raise ImportedTooEarly(name)

def exit_code(command):
    try:
        return main(command)
    except SystemExit as end:  # argparse leaves by itself
        return end.code
    except BaseException:
        traceback.print_exc()
        return 1

assert "torch" not in sys.modules
sys.meta_path.insert(0, Refuses())
datasets.config.HF_DATASETS_CACHE = pathlib.Path("cache").absolute()
answers = os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
for line in sys.stdin:
    signal.alarm(int(sys.argv[1]))
    with tempfile.TemporaryFile("w+") as told:
        os.dup2(told.fileno(), 2)
        code = exit_code(json.loads(line))
        sys.stderr.flush()
        told.seek(0)
        print(json.dumps([code, told.read()]), file=answers, flush=True)
"""


class WithoutTorch:
    """A process that runs one command after the other and cannot import what takes seconds."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WITHOUT_TORCH, str(LIMIT_SECONDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
        )

    def run(self, command: str) -> tuple[int, str]:
        """Its exit code, and what it says on stderr."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(shlex.split(command)), file=self.process.stdin, flush=True)
        code, told = json.loads(self.process.stdout.readline())
        return code, told


@pytest.fixture(scope="module")
def without_torch(bad_files):
    """Started with the first row, for all of them."""
    commands = WithoutTorch(bad_files)
    yield commands
    commands.process.communicate()


@pytest.fixture
def in_folder(bad_files, monkeypatch):
    monkeypatch.chdir(bad_files)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", bad_files / "cache")
    yield
    shutil.rmtree(bad_files / "runs", ignore_errors=True)


@pytest.mark.usefixtures("in_folder")
@pytest.mark.parametrize("source,command,code,words,is_late", ROWS)
def test_a_bad_input_is_told_with_its_exit_code_and_without_a_traceback(
    source, command, code, words, is_late, without_torch, request
):
    if is_late:
        ended, told = _run_here(command, request.getfixturevalue("capfd"), request.getfixturevalue("caplog"))
    else:
        ended, told = without_torch.run(command)
    row = f"{source} has for `{command}`: {[code, *words]}; told, with exit code {ended}:\n{told}"
    assert ended == code, row
    assert [word for word in words if word not in told] == [], row
    assert "Traceback" not in told, row
    if code == 2:
        assert "error:" in told, row


def _run_here(command: str, capfd: Any, caplog: Any) -> tuple[int, str]:
    try:
        ended = main(shlex.split(command))
    except SystemExit as exit:  # argparse leaves by itself
        ended = exit.code
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return ended, "\n".join([capfd.readouterr().err, *warnings])


@pytest.mark.usefixtures("in_folder")
@pytest.mark.parametrize(
    "command",
    [
        "train recipe=good.yaml data={}.jsonl",
        "train recipe=good.yaml model=./{}",
        "train recipe=good.yaml training.output_dir={}",
        "train recipe=good.yaml training.resume_from_checkpoint={}",
        "train recipe={}",
        "estimate model=./{}",
        "merge {} out",
        "merge adapter {}",
        "report {}",
    ],
)
def test_a_name_longer_than_any_file_has_is_told(command, capsys):
    name = "x" * 300
    with contextlib.suppress(SystemExit):
        assert main(shlex.split(command.format(name))) == 2
    assert f"{name}" in (told := capsys.readouterr().err)
    assert "File name too long" in told


@pytest.mark.usefixtures("in_folder")
@pytest.mark.parametrize(
    "what", ["good.jsonl", "good_model/config.json", "good.yaml", "template_broken.jinja"]
)
def test_what_may_not_be_read_is_told_with_its_path(what, capsys, monkeypatch):
    """By a system that refuses, as root may read everything."""
    opened = io.open

    def refusing(file, *args, **kwargs):
        if str(file).endswith(what):
            raise PermissionError(errno.EACCES, "Permission denied", str(file))
        return opened(file, *args, **kwargs)

    monkeypatch.setattr("builtins.open", refusing)
    monkeypatch.setattr("io.open", refusing)
    if accessor := getattr(pathlib, "_NormalAccessor", None):  # where Python 3.10 has kept it
        monkeypatch.setattr(accessor, "open", staticmethod(refusing))
    command = ["train", "recipe=good.yaml", "model=good_model", "data.chat_template=template_broken.jinja"]
    assert main(command) == 2
    told = capsys.readouterr().err
    assert "error: " in told
    ways = (f"{what} cannot be read", f"Permission denied: '{what}'", f"{what} (Permission denied)")
    assert any(way in told for way in ways), told
    assert "pipe" not in told


def test_the_table_covers_every_command():
    assert len(ROWS) >= 200
    commands = {row.values[1].split()[0] for row in ROWS if row.values[1]}
    assert commands >= {"train", "estimate", "recipes", "merge", "gpus", "models"}
