"""A script of transformers' Trainer, for a causal model, a classifier or an encoder with a decoder."""

import argparse
from typing import Any

import peft
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True)
parser.add_argument("--task", choices=["causal", "classes", "seq2seq"], default="causal")
parser.add_argument("--adapter")
parser.add_argument("--max_length", type=int, default=128)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--checkpointing", action="store_true")
parser.add_argument("--generate", action="store_true")
options = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(options.model)
rows = load_dataset(options.data, split="train")


def tokenized(row: dict[str, Any]) -> Any:
    """Turn a row's texts into tokens."""
    tokens = tokenizer(row["text"], truncation=True, max_length=options.max_length)
    if "target" in row:
        tokens["labels"] = tokenizer(row["target"], truncation=True, max_length=options.max_length).input_ids
    return tokens


rows = rows.map(tokenized, remove_columns=["text", *({"target"} & set(rows.column_names))])
model_class = {
    "causal": AutoModelForCausalLM,
    "classes": AutoModelForSequenceClassification,
    "seq2seq": AutoModelForSeq2SeqLM,
}[options.task]
model = model_class.from_pretrained(options.model)
tasks = {"causal": "CAUSAL_LM", "classes": "SEQ_CLS", "seq2seq": "SEQ_2_SEQ_LM"}
adapters = {
    "lora": lambda **task: peft.LoraConfig(r=8, target_modules="all-linear", **task),
    "dora": lambda **task: peft.LoraConfig(r=8, target_modules="all-linear", use_dora=True, **task),
    "oft": lambda **task: peft.OFTConfig(oft_block_size=16, target_modules="all-linear", **task),
    "vera": lambda **task: peft.VeraConfig(r=16, target_modules=["q_proj", "o_proj"], **task),
    "ia3": lambda **task: peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], **task
    ),
    "loha": lambda **task: peft.LoHaConfig(r=8, target_modules=["q_proj", "o_proj"], **task),
    "lokr": lambda **task: peft.LoKrConfig(r=8, target_modules=["q_proj", "o_proj"], **task),
}
if options.adapter:
    model = peft.get_peft_model(model, adapters[options.adapter](task_type=tasks[options.task]))
collators = {
    "causal": lambda: DataCollatorForLanguageModeling(tokenizer, mlm=False),
    "classes": lambda: DataCollatorWithPadding(tokenizer),
    "seq2seq": lambda: DataCollatorForSeq2Seq(tokenizer, model),
}
arguments = Seq2SeqTrainingArguments(
    "out",
    per_device_train_batch_size=4,
    per_device_eval_batch_size=4,
    gradient_accumulation_steps=options.accumulate,
    gradient_checkpointing=options.checkpointing,
    max_steps=3,
    eval_strategy="steps" if options.generate else "no",
    eval_steps=3,
    predict_with_generate=options.generate,
    generation_max_length=33,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
)
trainer = Seq2SeqTrainer(
    model,
    arguments,
    train_dataset=rows,
    eval_dataset=rows.select(range(8)) if options.generate else None,
    data_collator=collators[options.task](),
    processing_class=tokenizer,
)
trainer.train()
