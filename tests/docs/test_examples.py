"""Every Python example of the documentation runs as it stands."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from smaller_recipes import TINY, with_smaller_recipes

DOCS = Path(__file__).parents[2] / "docs"
OPTIONAL = ("peft", "bitsandbytes", "trl")
READ_ON = ("techniques_alone",)
"""Pages whose examples go on from each other: they are one program."""
SAID = {
    "monitoring": "held",
    "techniques_alone": "lost updates",
    "trainers": "offload.optimizer=host",
    "training": "21 None",
}


def examples():
    for page in sorted(DOCS.glob("*.md")):
        blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)
        for number, block in enumerate(["".join(blocks)] if page.stem in READ_ON else blocks):
            yield pytest.param(block, SAID.get(page.stem, "fits"), id=f"{page.stem}-{number}")


def test_examples_whose_libraries_import_bitsandbytes_import_ours_first():
    """It advertises a kernel on some processors, and we leave that out where we come first."""
    talkative = re.compile(r"^from (bitsandbytes|peft|transformers import .*Trainer)", re.M)
    sources = [example.values[0] for example in examples() if talkative.search(example.values[0])]
    assert len(sources) >= 3
    assert [source for source in sources if not source.startswith("from lowmem_ft")] == []


@pytest.mark.parametrize("source,said", examples())
def test_the_example_runs(source, said, forks, tmp_path):
    missing = [
        name for name in OPTIONAL if f"from {name}" in source and importlib.util.find_spec(name) is None
    ]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    done = forks.run(source, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl")
def test_the_readmes_lines_for_trl_train_a_shipped_recipe(forks, tmp_path):
    readme = (DOCS.parent / "README.md").read_text()
    (lines,) = re.findall(r"^```python\n(from datasets .*?)^```$", readme, re.M | re.S)
    program = with_smaller_recipes(lines.replace("Qwen/Qwen2.5-7B", str(TINY)), tmp_path, "my_chats.jsonl")
    done = forks.run(program, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "'train_loss'" in done.stdout
