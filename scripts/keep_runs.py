"""Write two short runs, one of the memory ladder's top rung and one of LoRA, which tests of every later version resume.

    cd tests/data/kept_runs && python ../../../scripts/keep_runs.py

Run it after a format of checkpoints or recipes has changed, and keep earlier output: the folder it makes is named after
the commit. A run is the output of ``lowmem-ft train`` after five steps of a model with 7,520 weights, without what no
resume reads: it keeps its first checkpoint, its recipe and its ``metrics.jsonl``.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from command_line import parser_of
from ladder_rungs import RUNGS, settings_of

from lowmem_ft.recipe import load_recipe
from lowmem_ft.training.run.loop import train

COMMON = (
    "model=model",
    "model.weights=pretrained",
    "data=data.jsonl",
    "data.split=train",
    "data.max_length=64",
    "training.max_steps=5",
    "training.save_steps=2",
    "training.save_total_limit=null",
    "training.eval_steps=null",
    "training.warmup_steps=0",
    "training.use_cpu=true",
)
RUNS = {
    "rung-8": (*settings_of(RUNGS[7]), "tiling.mlp=2"),
    "lora": ("adapter.name=lora",),
}


def main() -> None:
    """Make the runs of this commit in the working directory, which has their model and data."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    for name, settings in RUNS.items():
        keep_run(Path(commit) / name, settings)


def keep_run(folder: Path, settings: tuple[str, ...]) -> None:
    """Train, then delete files that the tests do not read."""
    train(load_recipe("tiny", [*COMMON, *settings, f"training.output_dir={folder}"]))
    shutil.rmtree(folder / "model")
    for checkpoint in folder.glob("checkpoint-*"):
        if checkpoint.name != "checkpoint-2":
            shutil.rmtree(checkpoint)


if __name__ == "__main__":
    parser_of(__doc__).parse_args()
    main()
