"""A script of a trainer of ``trl.experimental`` that learns from preferences: ORPO, CPO, or CPO with SimPO's loss."""

import argparse

from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--trainer", choices=["orpo", "cpo", "simpo"], required=True)
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True)
parser.add_argument("--lora", action="store_true")
options = parser.parse_args()

config_class, trainer_class = (
    (ORPOConfig, ORPOTrainer) if options.trainer == "orpo" else (CPOConfig, CPOTrainer)
)
loss = {"loss_type": "simpo", "cpo_alpha": 0.0} if options.trainer == "simpo" else {}
arguments = config_class(
    "out",
    per_device_train_batch_size=4,
    max_steps=3,
    max_length=128,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
    bf16=False,
    **loss,
)
trainer = trainer_class(
    AutoModelForCausalLM.from_pretrained(options.model),
    args=arguments,
    train_dataset=load_dataset(options.data, split="train"),
    processing_class=AutoTokenizer.from_pretrained(options.model),
    peft_config=LoraConfig(r=8, target_modules="all-linear") if options.lora else None,
)
trainer.train()
