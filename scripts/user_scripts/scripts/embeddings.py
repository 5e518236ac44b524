"""A script of sentence-transformers: an encoder learns to embed pairs of texts near each other."""

import argparse

from datasets import load_dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.losses import MultipleNegativesRankingLoss

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True)
options = parser.parse_args()

model = SentenceTransformer(options.model, device="cpu")
arguments = SentenceTransformerTrainingArguments(
    "out", per_device_train_batch_size=8, max_steps=3, save_strategy="no", report_to="none", use_cpu=True
)
SentenceTransformerTrainer(
    model,
    arguments,
    train_dataset=load_dataset(options.data, split="train"),
    loss=MultipleNegativesRankingLoss(model),
).train()
