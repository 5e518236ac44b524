"""A recipe inside TRL's trainers on rows that are tokens already: the losses of the trainer as it is."""

from __future__ import annotations

import json

import pytest
import torch
from attached_trainers import (
    IN_ONE_BATCH,
    SAME_LOSSES,
    SAME_NORMS,
    TINY,
    VERTICAL,
    Meter,
    arguments,
    recipe_of,
)
from chats_as_tokens import token_rows, write_tokens
from datasets import Dataset
from tiny_models import model_of
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, PrinterCallback
from trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from lowmem_ft import hf, load_recipe
from lowmem_ft.foundation.errors import DataError

HELD = ("offload.optimizer=host", "checkpointing.mode=full", "tiling.mlp=2", "loss.chunk_tokens=16")


def trained(trainer, meter, settings):
    trainer.remove_callback(PrinterCallback)
    if settings is not None:
        hf.attach(trainer, recipe_of(*settings))
    trainer.train()
    return meter


def sft(folder, settings=None, *, rows, **fields):
    shared = arguments(**{"max_steps": 2, "bf16": False, "max_length": 48, **fields})
    meter = Meter()
    trainer = SFTTrainer(
        model_of(),
        args=SFTConfig(str(folder), **shared),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(TINY),
        callbacks=[meter],
    )
    return trained(trainer, meter, settings)


@pytest.mark.parametrize("labelled", [True, False], ids=["labels", "ids"])
@pytest.mark.parametrize(
    "settings, fields",
    [(HELD, {}), (("loss.chunk_tokens=16",), {"packing": True}), (VERTICAL, IN_ONE_BATCH)],
    ids=["held", "packed", "vertical"],
)
def test_sft_on_tokens_has_trls_losses(settings, fields, labelled, tmp_path):
    rows = [row if labelled else {"input_ids": row["input_ids"]} for row in token_rows()[:32]]
    stock = sft(tmp_path, rows=rows, **fields)
    ours = sft(tmp_path, settings, rows=rows, **fields)
    assert ours.losses == pytest.approx(stock.losses, abs=SAME_LOSSES)
    assert ours.norms == pytest.approx(stock.norms, rel=SAME_NORMS)


def test_reward_on_pairs_of_tokens_has_trls_losses(tmp_path):
    pairs = [
        {"chosen_ids": row["input_ids"], "rejected_ids": row["input_ids"][:-3]} for row in token_rows()[:16]
    ]

    def train(settings=None):
        meter = Meter()
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(TINY, num_labels=1)
        trainer = RewardTrainer(
            AutoModelForSequenceClassification.from_config(config).train(),
            args=RewardConfig(str(tmp_path), **arguments(max_steps=2, bf16=False)),
            train_dataset=Dataset.from_list(pairs),
            processing_class=AutoTokenizer.from_pretrained(TINY),
            callbacks=[meter],
        )
        return trained(trainer, meter, settings)

    assert train(("checkpointing.mode=full",)).losses == pytest.approx(train().losses, abs=SAME_LOSSES)


def tiny(data):
    return load_recipe("tiny", [data, "data.eval_size=null", "training.eval_steps=null"])


def test_rows_of_tokens_go_to_trl_unchanged_and_pairs_of_tokens_to_its_reward_trainer(tmp_path):
    rows = hf.load_rows(tiny(write_tokens(tmp_path / "tokens.jsonl")), preferences=False)
    assert list(rows.train) == token_rows()
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"chosen_ids": [1, 2], "rejected_ids": [1, 3]}) + "\n")
    pairs = tiny(f"data={tmp_path / 'pairs.jsonl'}")
    assert hf.load_rows(pairs).train.column_names == ["chosen_ids", "rejected_ids"]
    for preferences in (True, False):
        with pytest.raises(
            DataError, match=r"tokens already .* RewardTrainer alone takes\. Leave preferences= out"
        ):
            hf.load_rows(pairs, preferences=preferences)


def test_a_recipe_read_from_a_trainer_has_the_length_of_its_tokens(tmp_path):
    rows = token_rows()
    trainer = SFTTrainer(
        model_of(),
        args=SFTConfig(str(tmp_path), **arguments(bf16=False, max_length=None)),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(TINY),
    )
    assert hf.recipe_from(trainer).data.max_length == max(len(row["input_ids"]) for row in rows)
