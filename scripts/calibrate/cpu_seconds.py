"""Compare seconds that an estimate for a processor scales from another step with what runs on this machine take.

    python scripts/calibrate cpu_seconds [--steps 4]

Each setting trains a random Llama for some steps, and leaves the seconds of one
(``foundation/catalog/timed_steps.py``); each does so twice. A run is then predicted from its repetition, from the
nearest other setting, as an estimate does, and from every other one. The machine must be idle.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from measured_on import measured_on
from transformers import LlamaConfig

from lowmem_ft.foundation.catalog.timed_steps import timed_steps
from lowmem_ft.foundation.memory.cpu_step_time import TimedStep
from lowmem_ft.foundation.user_paths import KEPT_FOLDER_VARIABLE

TINY = Path(__file__).resolve().parents[2] / "recipes" / "tiny"

SETTINGS = {
    "4 layers of 256": (256, 4, ()),
    "8 layers of 576": (576, 8, ()),
    "same, one row a micro-batch": (576, 8, ("training.per_device_train_batch_size=1",)),
    "same, checkpointed": (576, 8, ("checkpointing.mode=full",)),
    "same, LoRA": (576, 8, ("adapter.name=lora",)),
    "same, state in 8 bits": (576, 8, ("optimizer.state=8bit",)),
    "same, rows not packed": (576, 8, ("data.packing=false", "data.max_length=64")),
    "4 layers of 1,024": (1024, 4, ()),
}
"""Name of each setting: width and layers of the model, and settings of the recipe."""


def main() -> None:
    """Run all settings twice and print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--steps", type=int, default=4, help="steps of each run (default: 4)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ[KEPT_FOLDER_VARIABLE] = str(Path(folder, "kept"))
        rounds: list[dict[str, TimedStep]] = [{}, {}]
        for steps in rounds:
            for name, (width, layers, settings) in SETTINGS.items():
                steps[name] = timed(Path(folder, "model"), width, layers, settings, arguments.steps)
                print(f"{name}: {steps[name].seconds:.3g} s a step", flush=True)
    print(measured_on("cpu"))
    print_errors(*rounds)


def timed(model: Path, width: int, layers: int, settings: tuple[str, ...], num_steps: int) -> TimedStep:
    """Train a model and return the step that its run has left."""
    shutil.copytree(TINY, model, dirs_exist_ok=True)
    heads = width // 64
    LlamaConfig(
        vocab_size=512,  # the tokenizer's
        hidden_size=width,
        intermediate_size=8 * width // 3 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
    ).save_pretrained(model)
    command = [sys.executable, "-m", "lowmem_ft", "train", "recipe=tiny", f"model.name_or_path={model}"]
    command += [
        "training.gradient_accumulation_steps=1",
        "data.packing=true",
        "data.max_length=256",
        "data.eval_size=null",
        "training.eval_steps=null",
    ]
    command += [f"training.max_steps={num_steps}", "training.save_steps=null", "checkpointing.mode=none"]
    command += [
        f"training.output_dir={model.parent / 'run'}",
        "training.overwrite_output_dir=true",
        *settings,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return timed_steps(torch.get_num_threads())[-1]


def print_errors(steps: dict[str, TimedStep], again: dict[str, TimedStep]) -> None:
    """Print how far predictions of each step are off: from its repetition, the nearest other step, and all others."""
    errors: dict[str, list[float]] = {"repetition": [], "nearest": [], "all others": []}
    for name, step in steps.items():

        def error(other: TimedStep, step: TimedStep = step) -> float:
            ratio = step.work.reference_seconds / other.work.reference_seconds
            return other.seconds * ratio / step.seconds - 1

        def distance(other: TimedStep, step: TimedStep = step) -> float:
            return abs(math.log(step.work.reference_seconds / other.work.reference_seconds))

        others = [other for key, other in steps.items() if key != name]
        each = [error(other) for other in others]
        nearest = error(min(others, key=distance))
        repeated = error(again[name])
        errors["repetition"].append(repeated)
        errors["nearest"].append(nearest)
        errors["all others"] += each
        print(
            f"{name:28} {step.seconds:7.3f} s; from its repetition {repeated:+.0%}, the nearest {nearest:+.0%}, "
            f"all others {min(each):+.0%} to {max(each):+.0%}"
        )
    for source, found in errors.items():
        sizes = sorted(abs(one) for one in found)
        print(
            f"from {source}: median error {statistics.median(sizes):.0%}, worst {sizes[-1]:.0%} of {len(sizes)}"
        )


if __name__ == "__main__":
    main()
