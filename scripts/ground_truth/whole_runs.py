"""Whole runs without a GPU, each in a process of its own: what ``lowmem-ft train`` held, and is estimated to."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from transformers import LlamaConfig

from lowmem_ft.estimator import estimate_memory
from lowmem_ft.estimator.target import CPU
from lowmem_ft.memory.estimate import MemoryEstimate
from lowmem_ft.recipe import load_recipe

SMOLLM2 = LlamaConfig(
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    vocab_size=49152,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    dtype="float32",
)
"""SmolLM2-135M's architecture, for whoever estimates its runs where the model is not at hand."""

_SHORT = (
    "model={smollm2}",
    "data.eval_path=null",
    "data.max_length=128",
    "training.eval_on_start=false",
    "training.per_device_train_batch_size=2",
    "training.max_steps=2",
)
_BFLOAT16 = "model.dtype=bfloat16"

WHOLE_RUNS: dict[str, tuple[str, ...]] = {
    "tiny": ("recipe=tiny",),
    "smollm2 full float32": ("recipe=demo", *_SHORT),
    "smollm2 full bfloat16": ("recipe=demo", *_SHORT, _BFLOAT16, "optimizer.master=split16"),
    "smollm2 lora": ("recipe=demo", *_SHORT, _BFLOAT16, "adapter.name=lora"),
    "smollm2 8bit": ("recipe=demo-8bit", *_SHORT),
}
"""Settings by name; ``{smollm2}`` stands for the model's folder."""


def settings_of(name: str, smollm2: Path) -> list[str]:
    """The settings of a run, with a folder for ``{smollm2}``."""
    return [setting.format(smollm2=smollm2) for setting in (*WHOLE_RUNS[name], "training.use_cpu=true")]


@functools.cache
def estimate_whole(name: str) -> MemoryEstimate:
    """What a run is estimated to need, from the architecture alone."""
    with tempfile.TemporaryDirectory() as folder:
        SMOLLM2.save_pretrained(folder)
        recipe, *settings = settings_of(name, Path(folder))
        return estimate_memory(load_recipe(recipe.removeprefix("recipe="), settings), CPU)


def run_whole(name: str, smollm2: Path, num_threads: int) -> dict[str, int]:
    """Train, and read what the run has written of its memory.

    Args:
        name: of :data:`WHOLE_RUNS`.
        smollm2: the model's folder.
        num_threads: of torch.

    Returns:
        Bytes at the ``peak`` and in each phase.

    Raises:
        CalledProcessError: if the run fails; what it said is on stderr.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        command = [sys.executable, "-m", "lowmem_ft", "train", *settings_of(name, smollm2)]
        subprocess.run(
            [*command, f"training.output_dir={folder}"],
            env={**os.environ, "OMP_NUM_THREADS": str(num_threads)},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    measured = next(record["measured"] for record in reversed(records) if "measured" in record)
    return {"peak": measured["peak_bytes"], **measured["by_phase"]}
