"""A recipe attached to stock ``Trainer`` next to the same recipe in our own loop: peaks, losses and time of every rung.

    python scripts/bench trainer [--model FOLDER] [--steps 4]

Both take the same rows. Peak: the most bytes of tensors in the last step, including those stored on the host (exact
sums over storages, on a CPU). Time: of all steps except the first, as a ratio; the two run one after the other, so
this ratio is less reliable than the bytes.
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from command_line import parser_of
from demo.get_demo_model import default_cache_dir, get_demo_model
from ladder_rungs import RUNGS, Rung, settings_of
from measure_trl import StepMeter
from measured_on import measured_on
from measuring.measured_rows import write_completions
from transformers import AutoTokenizer, Trainer

from lowmem_ft import hf
from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.recipe import Recipe, load_recipe
from lowmem_ft.training.run.loop import TrainingRun

ROWS, MICRO_BATCHES, TOKENS = 2, 2, 256


def main() -> None:
    """Print a Markdown table and one JSON object."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, help="a model folder; the demo's SmolLM2-135M if left out")
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    model_dir = arguments.model or get_demo_model(default_cache_dir())
    rows = []
    print(
        "| rung | our loop | attached | peak ratio | time ratio | losses differ by |\n|---|---|---|---|---|---|"
    )
    for rung in RUNGS:
        with tempfile.TemporaryDirectory() as scratch:
            row = compare(rung, model_dir, Path(scratch), arguments.steps)
        peaks, seconds = row["peak_bytes"], row["step_seconds"]
        print(
            f"| {rung.name} | {' | '.join(format_bytes(peak) for peak in peaks)} | {peaks[1] / peaks[0]:.3f} "
            f"| {seconds[1] / seconds[0]:.2f} | {row['largest_difference']:.1e} |",
            flush=True,
        )
        rows.append(row)
    print(json.dumps({**measured_on("cpu"), "rows": rows}, indent=2))


def compare(rung: Rung, model_dir: Path, scratch: Path, num_steps: int) -> dict[str, Any]:
    """Compare one rung in both."""
    recipe = _recipe(rung, model_dir, scratch, num_steps)
    rows, ours = in_our_loop(recipe)
    theirs = in_trainer(recipe, rows)
    return {
        "rung": rung.name,
        "peak_bytes": [ours["peak_bytes"], theirs["peak_bytes"]],
        "step_seconds": [ours["step_seconds"], theirs["step_seconds"]],
        "losses": [ours["losses"], theirs["losses"]],
        "largest_difference": max(abs(a - b) for a, b in zip(ours["losses"], theirs["losses"], strict=True)),
    }


def in_our_loop(recipe: Recipe) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the rows of a run in our loop, and its results."""
    with StorageTracker() as tracker:
        run = TrainingRun.build(recipe)
        run.folder.start(recipe, run.progress)
        rows = [run.data.train.read(index)[0] for index in range(run.num_steps * ROWS * MICRO_BATCHES)]
        losses, seconds = [], []
        for _ in range(run.num_steps):
            gc.collect()
            tracker.reset_peak()
            start = time.perf_counter()
            losses.append(run.step()["loss"])
            seconds.append(time.perf_counter() - start)
        peak_bytes = tracker.peak_bytes
        run.session.close()
    gc.collect()
    labelled = [{"input_ids": list(row.input_ids_T), "labels": list(row.labels_T)} for row in rows]
    return labelled, {"peak_bytes": peak_bytes, "losses": losses, "step_seconds": _mean(seconds)}


def in_trainer(recipe: Recipe, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the results of stock ``Trainer`` with the recipe attached."""
    with StorageTracker() as tracker:
        meter = StepMeter(tracker)
        trainer = Trainer(
            model=hf.prepare_model(recipe.model.name_or_path or "", recipe),
            args=hf.training_arguments(
                recipe,
                output_dir=f"{recipe.training.output_dir}-trainer",
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                train_sampling_strategy="sequential",
                disable_tqdm=True,
                remove_unused_columns=False,
            ),
            train_dataset=rows,  # type: ignore[arg-type]
            data_collator=lambda rows: {key: torch.tensor([row[key] for row in rows]) for key in rows[0]},
            callbacks=[meter],
        )
        hf.attach(trainer, recipe)
        trainer.train()
    return {"peak_bytes": meter.peaks[-1], "losses": meter.losses, "step_seconds": _mean(meter.seconds)}


def _mean(seconds: list[float]) -> float:
    return sum(seconds[1:]) / (len(seconds) - 1)


def _recipe(rung: Rung, model_dir: Path, scratch: Path, num_steps: int) -> Recipe:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    file, count = scratch / "rows.jsonl", num_steps * ROWS * MICRO_BATCHES
    write_completions(
        file, model_dir, tokenizer, count=count, length=TOKENS
    )  # cut at max_length, to TOKENS each
    return load_recipe(
        None,
        [
            f"model={model_dir}",
            f"data={file}",
            f"data.max_length={TOKENS}",
            "data.shuffle=false",
            "data.loss_on=all",
            "training.use_cpu=true",
            f"training.per_device_train_batch_size={ROWS}",
            f"training.gradient_accumulation_steps={MICRO_BATCHES}",
            f"training.max_steps={num_steps}",
            "training.lr_scheduler_type=constant",
            "training.warmup_steps=0",
            f"training.output_dir={scratch / 'run'}",
            "training.save_steps=null",
            "budget.preflight=false",
            *settings_of(rung),
        ],
    )


if __name__ == "__main__":
    main()
