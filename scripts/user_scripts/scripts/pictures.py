"""A script that trains a tiny model on pictures or sound, by transformers' Trainer or TRL's SFTTrainer."""

import argparse

import seeing_models as tiny
import torch
from datasets import Dataset, Features, Image, List, Value
from peft import LoraConfig
from transformers import Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--trainer", choices=["Trainer", "SFT"], required=True)
parser.add_argument("--family", required=True)
parser.add_argument("--sounds", action="store_true")
parser.add_argument("--rows", type=int, default=4)
parser.add_argument("--lora", action="store_true")
options = parser.parse_args()

shared = {
    "output_dir": "out",
    "per_device_train_batch_size": options.rows,
    "max_steps": 3,
    "report_to": "none",
    "save_strategy": "no",
    "use_cpu": not torch.cuda.is_available(),
    "disable_tqdm": True,
    "logging_steps": 1,
}
model, family = tiny.model_of(options.family), options.family
if options.trainer == "Trainer":
    rows = tiny.rows_with_sounds(family, 12) if options.sounds else tiny.rows_with_pictures(12)
    collate = tiny.collator_of_sounds(family) if options.sounds else tiny.collator_of_pictures(family)
    arguments = TrainingArguments(**shared, remove_unused_columns=False)
    Trainer(model, arguments, train_dataset=rows, data_collator=collate).train()
else:
    turn = {"role": Value("string"), "content": Value("string")}
    columns = Features({"images": List(Image()), "messages": List(turn)})
    SFTTrainer(
        model,
        args=SFTConfig(**shared, bf16=False, max_length=None, gradient_checkpointing=False),
        train_dataset=Dataset.from_list(tiny.rows_with_pictures(12), columns),
        processing_class=tiny.processor(family),
        peft_config=LoraConfig(r=8, target_modules="all-linear") if options.lora else None,
    ).train()
