"""Trainers of transformers and TRL on tiny models, with a recipe attached or as they are."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from roundings import LOSS
from stock_scripts import IN_FOURS
from tiny_models import TINY, tiny_llama
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments, default_data_collator

from lowmem_ft import hf, load_recipe
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker

TOKENS = 16


def recipe_of(*settings: str, dtype: torch.dtype = torch.float32):
    """The defaults but for the settings; the model is whatever a trainer has."""
    return load_recipe(None, ["model=any", f"model.dtype={str(dtype).removeprefix('torch.')}", *settings])


def rows(num_rows: int = 24) -> list[dict[str, list[int]]]:
    """Rows whose labels are ignored up to different places, so that how losses are averaged matters."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for number in range(num_rows):
        ids = torch.randint(3, 64, (TOKENS,), generator=generator).tolist()
        ignored = number * 5 % 12
        made.append(
            {
                "input_ids": ids,
                "attention_mask": [1] * TOKENS,
                "labels": [-100] * ignored + ids[ignored:],
            }
        )
    return made


class Meter(TrainerCallback):
    """What a trainer logs, and the bytes that a micro-batch keeps for backward."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.evaluations: list[dict[str, float]] = []
        self.logs: list[dict[str, float]] = []
        self.kept: list[int] = []
        self.tracker: StorageTracker | None = None

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))
        if "loss" in logs:
            self.losses.append(logs["loss"])
            self.norms.append(float(logs["grad_norm"]))
        if "eval_loss" in logs:
            self.evaluations.append(logs)


def measure_kept_bytes(trainer: Any, meter: Meter) -> None:
    """From now on note what lives as each backward begins, beside what the model's weights take."""
    backward = trainer.accelerator.backward

    def measured(loss: torch.Tensor, **kwargs: Any) -> None:
        gc.collect()
        assert meter.tracker is not None
        meter.kept.append(meter.tracker.live_bytes)
        backward(loss, **kwargs)

    trainer.accelerator.backward = measured


def arguments(**fields: Any) -> dict[str, Any]:
    """Of any of the trainers: four steps of two micro-batches of four rows, on the CPU, clipped."""
    shared = {
        **IN_FOURS,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.5,
        "lr_scheduler_type": "constant",
    }
    return {**shared, **fields}


IN_ONE_BATCH = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
"""The same steps, for vertical order."""
VERTICAL = (
    "accumulation.order=vertical",
    "checkpointing.mode=full",
    "training.per_device_train_batch_size=4",
)
SAME_LOSSES = 8 * LOSS
"""Of losses below 8."""
SAME_NORMS = 32 * LOSS
"""As a share: a norm of gradients moves with the weights, which steps of AdamW have moved apart."""


def trainer_of(folder: Path, *, model: Any = None, kind: type[Trainer] = Trainer, fields=None, **given: Any):
    """A ``Trainer`` on :func:`rows`, and what it logs."""
    meter = Meter()
    trainer = kind(
        model=model if model is not None else tiny_llama(),
        args=TrainingArguments(str(folder), **arguments(**(fields or {}))),
        train_dataset=rows(),
        eval_dataset=rows(8),
        data_collator=default_data_collator,
        callbacks=[meter],
        **given,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer, meter


def attached_trainer(
    folder: Path,
    *settings: str,
    dtype: torch.dtype = torch.float32,
    fields: dict[str, Any] | None = None,
    **given: Any,
):
    """A ``Trainer`` with a recipe attached; in vertical order with the same steps in one batch each."""
    wanted = recipe_of(*settings, dtype=dtype)
    if wanted.accumulation.order == "vertical":
        fields = {**IN_ONE_BATCH, **(fields or {})}
    model = hf.prepare_model(tiny_llama(dtype), wanted)
    trainer, meter = trainer_of(folder, model=model, fields=fields, **given)
    return trainer, meter, hf.attach(trainer, wanted)


def problems_of(trainer: Any, *settings: str) -> tuple[str, ...]:
    """Why a recipe of these settings cannot be attached; nothing of it is then on."""
    forward = trainer.model.forward
    with pytest.raises(UserError) as caught:
        hf.attach(trainer, recipe_of(*settings))
    assert not hasattr(trainer, "lowmem_ft"), "something is attached"
    assert trainer.model.forward == forward, "something is switched on"
    return caught.value.problems


def sentence_of(trainer: Any, *settings: str) -> str:
    """The same where there is one reason."""
    (problem,) = problems_of(trainer, *settings)
    return problem


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    """Copies of all of them."""
    return {name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()}


def chats() -> list[dict[str, Any]]:
    """Those of the tiny recipe."""
    return [json.loads(line) for line in (TINY / "data.jsonl").read_text().splitlines()]
