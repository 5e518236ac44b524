"""A script of a trainer of ``trl.experimental`` that generates: GKD or online DPO."""

import argparse

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--trainer", choices=["gkd", "online_dpo"], required=True)
parser.add_argument("--model", required=True)
parser.add_argument("--teacher")
parser.add_argument("--data", required=True)
options = parser.parse_args()


def length(completions: list[str], **columns: object) -> list[float]:
    """Reward long answers."""
    return [float(len(completion)) for completion in completions]


shared = {
    "output_dir": "out",
    "per_device_train_batch_size": 4,
    "max_steps": 3,
    "max_length": 512,
    "max_new_tokens": 32,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
}
parts = {
    "model": AutoModelForCausalLM.from_pretrained(options.model),
    "train_dataset": load_dataset(options.data, split="train"),
    "processing_class": AutoTokenizer.from_pretrained(options.model, padding_side="left"),
}
if options.trainer == "gkd":
    teacher = AutoModelForCausalLM.from_pretrained(options.teacher)
    trainer = GKDTrainer(teacher_model=teacher, args=GKDConfig(**shared, lmbda=1.0), **parts)
else:
    trainer = OnlineDPOTrainer(reward_funcs=length, args=OnlineDPOConfig(**shared), **parts)
trainer.train()
