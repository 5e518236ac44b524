"""Runs that a CUDA device trains and a virtual GPU rehearses: both tests take them from here."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from lowmem_ft.foundation.catalog.context_overhead import process_overhead_bytes
from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.errors import DoesNotFitError
from lowmem_ft.recipe import Recipe, load_recipe

_IN_BACKWARD = ("optimizer.in_backward=true", "accumulation.order=vertical")
_TWO_MICRO_BATCHES = ("training.gradient_accumulation_steps=2",)
_LORA = ("model.dtype=bfloat16", "adapter.name=lora", "adapter.r=8", "training.learning_rate=0.02")

KERNELS = [
    ("model.dtype=bfloat16", "optimizer.master=split24", "optimizer.state=8bit", *_IN_BACKWARD),
    ("model.dtype=bfloat16", "optimizer.master=split16", "optimizer.state={exp_avg: bf16, exp_avg_sq: fp32}"),
    ("model.dtype=bfloat16", "model.kernels=liger", "loss.chunk_tokens=32"),
    ("model.dtype=bfloat16", "accumulation.fusion=true", *_TWO_MICRO_BATCHES),
    ("model.dtype=bfloat16", "accumulation.fusion=true", "accumulation.dtype=weights", *_TWO_MICRO_BATCHES),
    (*_LORA, "training.mixed_precision=bf16", "model.kernels=liger"),
    (*_LORA, "training.mixed_precision=bf16", "model.quantization=nf4"),
    (*_LORA, "training.mixed_precision=bf16", "model.quantization=int8"),
]
"""Runs with kernels of our own, of Liger and of bitsandbytes; tests of these rehearse them, too."""

RUNS = [
    (),
    ("training.mixed_precision=bf16",),
    ("training.mixed_precision=fp16",),
    ("model.dtype=bfloat16", "optimizer.name=paged_adamw_8bit"),
    ("data.packing=true", "training.mixed_precision=bf16"),
    *KERNELS,
]
SHORT = ("training.max_steps=6", "training.save_steps=3", "training.eval_steps=null")
MOST_BYTES = 2**30
"""Of the tiny model's run: not the host's memory."""


def short_recipe(folder: Path, *overrides: str) -> Recipe:
    """The tiny recipe on a GPU, for six steps."""
    return load_recipe("tiny", [f"training.output_dir={folder}", *SHORT, *overrides])


def settings_of_seven_layers(folder: Path) -> tuple[str, ...]:
    """The tiny model with layers enough for each slot to be used again: two would each keep one to themselves.

    With weights in a file, as random ones are made where the weights will be: a GPU draws other numbers than a CPU.
    """
    folder = shutil.copytree(Path(__file__).parents[1] / "recipes" / "tiny", folder / "seven_layers")
    config = AutoConfig.from_pretrained(folder, num_hidden_layers=7)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return ("training.full_determinism=true", f"model={folder}", "model.weights=pretrained")


def running_out_while_loading(budget: str) -> pytest.RaisesExc[DoesNotFitError]:
    """What a run ends with whose model does not go into its budget."""
    return pytest.raises(
        DoesNotFitError, match=rf"ran out while the model was loaded \(budget\.device={budget}\)"
    )


def budget_of_one_mib(gpu: Gpu) -> str:
    """Of tensors; torch gets memory by twos."""
    overhead = process_overhead_bytes(gpu, uses_bitsandbytes=False, num_processes=1)
    return f"{sum(overhead.values()) // 2**10 + 2**10}KiB"
