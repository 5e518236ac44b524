"""The table of trainers in the documentation is the one that attaching reads."""

from __future__ import annotations

from trainer_table import PAGE, with_table

from lowmem_ft.hf.trainers.trainer_kinds import ROWS
from lowmem_ft.recipe.reading.keys import recipe_keys

DETAILS = {
    "checkpointing.every_n_layers": "checkpointing.mode",
    "checkpointing.skip_last_layers": "checkpointing.mode",
    "offload.resident_layers": "offload.parameters",
    "offload.folder": "offload.parameters",
    "model.dtype": "the model's own",
    "data.max_length": "the trainer's own",
    "training.per_device_train_batch_size": "the trainer's own",
    "training.gradient_accumulation_steps": "the trainer's own",
    "training.mixed_precision": "the trainer's own",
    "distributed.strategy": "the launcher's",
    "distributed.reshard_after_forward": "the launcher's",
    "distributed.cpu_offload": "the launcher's",
    "distributed.sync_each_batch": "the launcher's",
}
"""Memory knobs that are no technique of their own, and whose they are."""


def test_the_page_has_the_present_table():
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page) == page, (
        f"{PAGE.name} is older than its table: run `python scripts/trainer_table.py`"
    )


def test_every_memory_knob_is_in_the_table():
    knobs = {path for path, key in recipe_keys().items() if key.effects is not None}
    assert knobs - {row.key for row in ROWS} == DETAILS.keys()
