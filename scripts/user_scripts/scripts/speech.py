"""A script that trains Whisper by transformers' Seq2SeqTrainer on sounds of different lengths."""

import argparse
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForSpeechSeq2Seq,
    AutoTokenizer,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    WhisperFeatureExtractor,
)

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True)
parser.add_argument("--lora", action="store_true")
options = parser.parse_args()

extractor = WhisperFeatureExtractor()
tokenizer = AutoTokenizer.from_pretrained(options.model)
model = AutoModelForSpeechSeq2Seq.from_pretrained(options.model)
if options.lora:
    model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))


class Sounds(torch.utils.data.Dataset):
    """Sounds of a folder, with their texts."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.rows = [json.loads(line) for line in (self.folder / "train.jsonl").read_text().splitlines()]

    def __len__(self) -> int:
        """Return the number of sounds."""
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return one sound's features and the tokens of its text."""
        with wave.open(str(self.folder / self.rows[number]["file"])) as sound:
            samples = np.frombuffer(sound.readframes(sound.getnframes()), dtype=np.int16) / 32768
        features = extractor(samples, sampling_rate=16_000).input_features[0]
        return {"input_features": features, "labels": tokenizer(self.rows[number]["text"]).input_ids}


def collated(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Make a batch, whose labels are padded with -100."""
    longest = max(len(row["labels"]) for row in rows)
    labels = [row["labels"] + [-100] * (longest - len(row["labels"])) for row in rows]
    features = torch.tensor(np.stack([row["input_features"] for row in rows]), dtype=torch.float32)
    return {"input_features": features, "labels": torch.tensor(labels)}


arguments = Seq2SeqTrainingArguments(
    "out", per_device_train_batch_size=4, max_steps=3, save_strategy="no", report_to="none", use_cpu=True
)
Seq2SeqTrainer(model, arguments, train_dataset=Sounds(options.data), data_collator=collated).train()
