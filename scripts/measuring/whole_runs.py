"""Whole runs without a GPU, each in a process of its own: memory of ``lowmem-ft train``, measured and estimated."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, Phi3Config, PretrainedConfig, Qwen3MoeConfig

from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.planning.estimator import estimate_memory
from lowmem_ft.planning.estimator.device_target import CPU
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
"""SmolLM2-135M's architecture, to estimate its runs without the model's files."""

_SMOLLM2 = "model={smollm2}"
_SHORT = (
    "data.eval_path=null",
    "data.max_length=128",
    "training.eval_on_start=false",
    "training.per_device_train_batch_size=2",
    "training.max_steps=2",
)
_BFLOAT16 = "model.dtype=bfloat16"
_STREAMED = (
    *("optimizer.master=split24", "optimizer.state=8bit", "optimizer.in_backward=true"),
    *("training.gradient_accumulation_steps=2", "accumulation.order=vertical", "checkpointing.mode=full"),
    *("offload.optimizer=host", "offload.parameters=stream"),
)

_SIZES: dict[str, Any] = {
    "vocab_size": SMOLLM2.vocab_size,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_EXPERTS: dict[str, Any] = {
    "head_dim": 64,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 256,
}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_SIZES, intermediate_size=1408),
    "phi3": Phi3Config(**_SIZES, intermediate_size=1408),
    "qwen3_moe": Qwen3MoeConfig(**_SIZES, **_EXPERTS),
}
"""Models with random weights and SmolLM2's tokenizer, whose steps take seconds."""


def _random(family: str) -> tuple[str, ...]:
    return (f"model={{{family}}}", "model.weights=random", "model.tokenizer_name_or_path={smollm2}")


WHOLE_RUNS: dict[str, tuple[str, ...]] = {
    "tiny": ("recipe=tiny",),
    "smollm2 full float32": ("recipe=demo", _SMOLLM2, *_SHORT),
    "smollm2 full bfloat16": ("recipe=demo", _SMOLLM2, *_SHORT, _BFLOAT16, "optimizer.master=split16"),
    "smollm2 lora": ("recipe=demo", _SMOLLM2, *_SHORT, _BFLOAT16, "adapter.name=lora"),
    "smollm2 8bit": ("recipe=demo-8bit", _SMOLLM2, *_SHORT),
    "demo": ("recipe=demo", _SMOLLM2, "training.max_steps=4", "data.max_length=136"),  # its longest row
    "llama, groups of heads": ("recipe=demo", *_SHORT, *_random("llama")),
    "llama, streamed": ("recipe=demo", *_SHORT, *_random("llama"), _BFLOAT16, *_STREAMED),
    "qwen3 moe 8bit": (
        *("recipe=demo-8bit", *_SHORT, *_random("qwen3_moe")),
        "checkpointing.mode=selective",
    ),
    "phi3 lora, dropout": (
        *("recipe=demo", *_SHORT, *_random("phi3"), _BFLOAT16),
        *("adapter.name=lora", "adapter.r=13", "adapter.lora_dropout=0.1"),
    ),
}
"""Settings by name; ``{smollm2}``, ``{llama}`` and so on are replaced by the folders of models."""


def settings_of(name: str, smollm2: Path | str, families: Path | str) -> list[str]:
    """Return the settings of a run.

    Args:
        name: name in :data:`WHOLE_RUNS`.
        smollm2: the model's folder.
        families: the folder in which :func:`write_families` has written its models.
    """
    folders = {"smollm2": smollm2, **{family: f"{families}/{family}" for family in FAMILIES}}
    return [setting.format(**folders) for setting in (*WHOLE_RUNS[name], "training.use_cpu=true")]


def write_families(folder: Path) -> None:
    """Write the config of each of :data:`FAMILIES` into a folder of its name."""
    for family, config in FAMILIES.items():
        config.save_pretrained(folder / family)


@functools.cache
def estimate_whole(name: str) -> MemoryEstimate:
    """Return the estimate of a run, from the architecture alone."""
    with tempfile.TemporaryDirectory() as folder:
        SMOLLM2.save_pretrained(folder)
        write_families(Path(folder))
        recipe, *settings = settings_of(name, folder, folder)
        return estimate_memory(load_recipe(recipe.removeprefix("recipe="), settings), CPU)


def run_whole(name: str, smollm2: Path, num_threads: int) -> dict[str, int]:
    """Train, and read the memory that the run has recorded.

    Args:
        name: name in :data:`WHOLE_RUNS`.
        smollm2: the model's folder.
        num_threads: torch's number of threads.

    Returns:
        Bytes at the ``peak`` and in each phase.

    Raises:
        CalledProcessError: if the run fails; its messages are on stderr.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        write_families(Path(scratch))
        command = [sys.executable, "-m", "lowmem_ft", "train", *settings_of(name, smollm2, scratch)]
        subprocess.run(
            [*command, f"training.output_dir={folder}"],
            env={**os.environ, "OMP_NUM_THREADS": str(num_threads)},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    measured = next(record["measured"] for record in reversed(records) if "measured" in record)
    return {"peak": measured["peak_bytes"], **measured["by_phase"]}
