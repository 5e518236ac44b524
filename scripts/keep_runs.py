"""Write one short run for each rung of the memory ladder, which tests of every later version resume.

    cd tests/data/kept_runs && python ../../../scripts/keep_runs.py

Run it after a format of checkpoints or recipes has changed, and keep earlier output: the folder it makes is named after
the commit. A run is the output of ``lowmem-ft train`` after five steps of a model with 7,520 weights, without what no
resume reads: it keeps its first checkpoint, its recipe and its ``metrics.jsonl``.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import torch
from command_line import parser_of
from ladder_rungs import RUNGS, settings_of
from transformers import AutoConfig, AutoModelForCausalLM

from lowmem_ft.recipe import load_recipe
from lowmem_ft.training.loop import train

TINY = Path(__file__).resolve().parent.parent / "recipes" / "tiny"
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
BESIDE_THE_LADDER = {
    "lora": ("adapter.name=lora",),
    "qlora": ("adapter.name=lora", "model.quantization=nf4", "model.dtype=bfloat16"),
    "bitsandbytes": ("optimizer.name=adamw_bnb_8bit",),
}


def main() -> None:
    """Make the model and data if they are missing, then the runs of this commit, in the working directory."""
    if not Path("model").exists():
        make_model(Path("model"))
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    rungs = {f"rung-{number}": settings_of(rung) for number, rung in enumerate(RUNGS, start=1)}
    for name, settings in {**rungs, **BESIDE_THE_LADDER}.items():
        keep_run(Path(commit) / name, settings)


def make_model(folder: Path) -> None:
    """Save the recipe ``tiny``'s model, narrower and with weights that no later version can draw differently."""
    shutil.copytree(TINY, folder)
    (folder / "data.jsonl").rename(folder.with_name("data.jsonl"))
    config = AutoConfig.from_pretrained(
        folder,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def keep_run(folder: Path, settings: tuple[str, ...]) -> None:
    """Train, then delete files that the tests do not read."""
    fewer_tiles = [setting.replace("tiling.mlp=8", "tiling.mlp=2") for setting in settings]
    train(load_recipe("tiny", [*COMMON, *fewer_tiles, f"training.output_dir={folder}"]))
    shutil.rmtree(folder / "model")
    for checkpoint in folder.glob("checkpoint-*"):
        if checkpoint.name != "checkpoint-2":
            shutil.rmtree(checkpoint)


if __name__ == "__main__":
    parser_of(__doc__).parse_args()
    main()
