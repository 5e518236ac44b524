"""Our training step next to that of stock ``transformers.Trainer``: time, loss and bytes, on equal work in one run.

    python scripts/bench step [--model FOLDER] [--steps 20] [--device cpu]

Both train the same model from the same weights on the same batches with the same AdamW, schedule and clipping, in fp32.
They alternate step by step in one process, so that any other load on the machine affects both alike: our whole step
(data, forward, backward, clipping, update, metrics on disk) runs inside the Trainer's ``on_step_end``, and the
Trainer's is the time between two of those. Bytes are exact sums over tensor storages, not allocator statistics.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from command_line import parser_of
from demo.get_demo_model import default_cache_dir, get_demo_model
from measured_on import measured_on, require_device
from measuring.measured_rows import MeasuredRows, write_completions
from transformers import AutoModelForCausalLM, PretrainedConfig, Trainer, TrainerCallback, TrainingArguments

from lowmem_ft.data.batches.batch import Batch
from lowmem_ft.data.batches.collating import Collator
from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.models.tokenizer import load_tokenizer
from lowmem_ft.recipe import Recipe, load_recipe
from lowmem_ft.techniques.checkpointing.checkpointed_layers import enable_checkpointing
from lowmem_ft.techniques.checkpointing.config import CheckpointingConfig
from lowmem_ft.techniques.loss.chunked_loss import LossConfig, enable_chunked_loss
from lowmem_ft.training.run.loop import TrainingRun

ROWS, TOKENS = 2, 256
LEARNING_RATE = 1e-4


def main() -> None:
    """Run both side by side and print one JSON object."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, help="a model folder; the demo's SmolLM2-135M if left out")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args()
    require_device(arguments.device)
    model_dir = arguments.model or get_demo_model(default_cache_dir())
    with tempfile.TemporaryDirectory() as scratch:
        recipe = _recipe(model_dir, Path(scratch), arguments)
        steps = compare_steps(recipe, Path(scratch))
    row = {
        **measured_on(arguments.device),
        "model": model_dir.name,
        "batch": f"{ROWS} x {TOKENS} tokens, fp32",
        **steps,
        "bytes": compare_bytes(model_dir, torch.device(arguments.device)),
    }
    print(json.dumps(row, indent=2))


def compare_steps(recipe: Recipe, scratch: Path) -> dict[str, Any]:
    """Return the median step time of both and the largest difference of their losses, over alternating steps."""
    ours = TrainingRun.build(recipe)
    ours.folder.start(recipe, ours.progress)
    rows = [ours.data.train.read(index)[0] for index in range(ours.num_steps * ROWS)]
    alternate = _Alternate(ours)
    trainer = Trainer(
        model=_model(str(recipe.model.name_or_path)),
        args=TrainingArguments(
            output_dir=str(scratch / "trainer"),
            per_device_train_batch_size=ROWS,
            max_steps=ours.num_steps,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            logging_steps=1,
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to="none",
            train_sampling_strategy="sequential",
            use_cpu=recipe.training.use_cpu,
            disable_tqdm=True,
            remove_unused_columns=False,
        ),
        train_dataset=[{"input_ids": row.input_ids_T, "labels": row.labels_T} for row in rows],  # type: ignore[arg-type]
        data_collator=lambda rows: {key: torch.tensor([row[key] for row in rows]) for key in rows[0]},
        callbacks=[alternate],
    )
    trainer.args._n_gpu = min(1, trainer.args.n_gpu)  # or it would split its rows among all devices
    trainer.train()
    theirs = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    return alternate.result(theirs)


class _Alternate(TrainerCallback):
    """Takes one of our steps after each of the Trainer's, and times both; the first step of each only warms up."""

    def __init__(self, ours: TrainingRun) -> None:
        self.ours = ours
        self.seconds: dict[str, list[float]] = {"ours": [], "trainer": []}
        self.losses: list[float] = []
        self._since = 0.0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        now = self._seconds_when_done()
        self.seconds["trainer"].append(now - self._since)
        self.losses.append(self.ours.step()["loss"])
        self._since = self._seconds_when_done()
        self.seconds["ours"].append(self._since - now)

    def _seconds_when_done(self) -> float:
        """Read the clock once the device is done, or one's last kernels would count as the other's."""
        if self.ours.runtime.machine.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def result(self, their_losses: list[float]) -> dict[str, Any]:
        pairs = list(zip(self.seconds["ours"][1:], self.seconds["trainer"][1:], strict=True))
        return {
            "step_seconds": {
                "ours": round(statistics.median(ours for ours, _ in pairs), 4),
                "trainer": round(statistics.median(trainer for _, trainer in pairs), 4),
                "median_ratio": round(statistics.median(ours / trainer for ours, trainer in pairs), 4),
                "num_steps": len(pairs),
            },
            "loss": {
                "first": self.losses[0],
                "last": self.losses[-1],
                "largest_difference": max(
                    abs(ours - theirs) for ours, theirs in zip(self.losses, their_losses, strict=True)
                ),
            },
        }


def compare_bytes(model_dir: Path, device: torch.device) -> dict[str, Any]:
    """Return bytes kept from forward to backward, and their peak in a pass, weights and gradients excluded."""
    rows: dict[str, Any] = {}
    for name, chunk_tokens, checkpointed in (
        ("trainer default", None, False),
        ("chunked loss", 256, False),
        ("checkpointing", None, True),
        ("chunked loss and checkpointing", 256, True),
    ):
        model = _model(str(model_dir)).to(device)
        model.train()
        if chunk_tokens is not None:
            enable_chunked_loss(model, LossConfig(chunk_tokens=chunk_tokens))
        if checkpointed:
            enable_checkpointing(model, CheckpointingConfig(mode="full"))
        kept, peak = _activation_bytes(model, device)
        rows[name] = {
            "kept": format_bytes(kept),
            "peak": format_bytes(peak),
            "kept_bytes": kept,
            "peak_bytes": peak,
        }
    default = rows["trainer default"]
    for row in rows.values():
        row["kept_ratio"] = round(row["kept_bytes"] / default["kept_bytes"], 4)
        row["peak_ratio"] = round(row["peak_bytes"] / default["peak_bytes"], 4)
    return rows


def _activation_bytes(model: Any, device: torch.device) -> tuple[int, int]:
    batch = _batch(model.config, device)
    # Gradients exist before the measured pass, which accumulates into them, so that only activations are counted.
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with StorageTracker(device.type) as tracker:
        loss = model(
            **batch.model_inputs(), labels=batch.labels_BT, num_items_in_batch=1, use_cache=False
        ).loss
        kept = tracker.live_bytes
        loss.backward()
        return kept, tracker.peak_bytes


def _batch(config: PretrainedConfig, device: torch.device) -> Batch:
    rows = MeasuredRows.of(config, (TOKENS,)).rows(0, 4)
    return Collator(pad_token_id=0, max_length=TOKENS)(rows).to(device)


def _model(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _recipe(model_dir: Path, scratch: Path, arguments: argparse.Namespace) -> Recipe:
    tokenizer = load_tokenizer(load_recipe("demo", [f"model={model_dir}"]).model)
    file, count = scratch / "data.jsonl", arguments.steps * ROWS
    write_completions(
        file, model_dir, tokenizer, count=count, length=TOKENS
    )  # cut at max_length, to TOKENS each
    return load_recipe(
        "demo",
        [
            f"model={model_dir}",
            f"data={scratch / 'data.jsonl'}",
            "data.eval_path=null",
            "data.loss_on=all",
            f"data.max_length={TOKENS}",
            "data.packing=false",
            "data.shuffle=false",
            f"training.output_dir={scratch / 'ours'}",
            f"training.max_steps={arguments.steps}",
            f"training.per_device_train_batch_size={ROWS}",
            "training.gradient_accumulation_steps=1",
            f"training.learning_rate={LEARNING_RATE}",
            "training.lr_scheduler_type=constant",
            "training.warmup_steps=0",
            "training.max_grad_norm=1.0",
            "training.mixed_precision=no",
            "training.eval_on_start=false",
            f"training.use_cpu={'true' if arguments.device == 'cpu' else 'false'}",
            "model.dtype=float32",
            "model.attn_implementation=sdpa",
            "checkpointing.mode=none",
            "optimizer.name=adamw",
            "optimizer.weight_decay=0",
        ],
    )


if __name__ == "__main__":
    main()
