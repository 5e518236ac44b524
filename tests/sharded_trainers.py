"""Trainers with a recipe attached whose processes share a model by Accelerate's FSDP 2: programs for each of them.

A case has twelve rows a step, over however many processes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attached_trainers import Meter, recipe_of, rows
from datasets import load_dataset
from fsdp2_on_gloo import FSDP2, launch
from processes import Forks
from tiny_models import TINY, model_of, tiny_llama
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer, Trainer, TrainingArguments, default_data_collator

from lowmem_ft import hf
from lowmem_ft.foundation.tensors.local_shards import whole_tensor

EVERYTHING = (
    "checkpointing.mode=full tiling.mlp=2 tiling.head=3 offload.activations=inputs offload.optimizer=host "
    "accumulation.order=vertical training.per_device_train_batch_size=2 optimizer.in_backward=true"
)
CASES: Mapping[str, str] = {
    "plain": "",
    "tied": "tied checkpointing.mode=full",
    "everything": f"one-batch {EVERYTHING}",
    "split16": "bfloat16 optimizer.master=split16",
    "split24": "tied bfloat16 optimizer.master=split24 optimizer.state=8bit",
    "autocast": "bf16 checkpointing.mode=full",
    "rounded-autocast": "bf16 bfloat16 optimizer.master=split16",
    "stock-loss": "loss.chunk_tokens=null checkpointing.mode=selective",
    "by-script": "by-script",
    "sft": "sft checkpointing.mode=full",
    "sft-trls-loss": "sft loss.chunk_tokens=null",
    "lora": "lora checkpointing.mode=full",
    "sft-lora": "sft lora",
    "dpo": "dpo checkpointing.mode=full",
    "dpo-lora": "dpo lora",
    "dpo-precomputed": "dpo precomputed",
}
"""By name: words for what is trained, and settings of the recipe."""

SHARED: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "max_steps": 3,
    "logging_steps": 1,
    "logging_nan_inf_filter": False,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.5,
    "train_sampling_strategy": "sequential",
}
NO_IDEA = [{"role": "assistant", "content": "No idea at all."}]


def num_processes() -> int:
    """How many train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def model_for(words: set[str]) -> Any:
    """The model of a case."""
    dtype = torch.bfloat16 if "bfloat16" in words else torch.float32
    is_trls = words & {"sft", "dpo"}
    model: Any = model_of() if is_trls else tiny_llama(dtype, tie_word_embeddings="tied" in words)
    if "lora" in words:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(3)
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    return model


def trainer_for(folder: str, case: str, **fields: Any) -> tuple[Any, Meter]:
    """A trainer with the recipe of a case attached, and what it logs."""
    words = {word for word in case.split() if "=" not in word}
    settings = [word for word in case.split() if "=" in word]
    a_step = 12 // num_processes()
    own: dict[str, Any] = {**SHARED, "per_device_train_batch_size": a_step // 2, **fields}
    if "one-batch" in words:
        own |= {"per_device_train_batch_size": a_step, "gradient_accumulation_steps": 1}
    if "bf16" in words:
        own |= {"bf16": True}
    if "by-script" in words and num_processes() > 1:
        own |= FSDP2
    model = model_for(words)
    meter = Meter()
    trainer = _trainer(folder, words, model, own, meter)
    hf.attach(trainer, recipe_of(*settings, dtype=model.dtype))
    return trainer, meter


def _trainer(folder: str, words: set[str], model: Any, fields: dict[str, Any], meter: Meter) -> Any:
    if not words & {"sft", "dpo"}:
        train_dataset: Any = rows(36)
        eval_dataset: Any = rows(8)
        return Trainer(
            model,
            TrainingArguments(folder, **fields),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            data_collator=default_data_collator,
            callbacks=[meter],
        )
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    fields = {**fields, "bf16": False, "gradient_checkpointing": False, "max_length": 64}
    # From a file: where TRL keeps what it computes in advance, all processes look.
    chats = load_dataset("json", data_files=str(TINY / "data.jsonl"), split="train[:36]")
    given = {"processing_class": AutoTokenizer.from_pretrained(TINY), "callbacks": [meter]}
    if "sft" in words:
        return SFTTrainer(model, args=SFTConfig(folder, **fields), train_dataset=chats, **given)
    return DPOTrainer(
        model,
        ref_model=None if "lora" in words else model_of(seed=1),
        args=DPOConfig(folder, precompute_ref_log_probs="precomputed" in words, **fields),
        train_dataset=chats.map(_pair, remove_columns=chats.column_names),
        **given,
    )


def _pair(row: dict[str, Any]) -> dict[str, Any]:
    chat = row["messages"]
    return {"prompt": chat[:1], "chosen": chat[1:2], "rejected": NO_IDEA}


def assert_sharded(trainer: Any) -> None:
    """Each weight is in parts, one in each process."""
    assert isinstance(trainer.model_wrapped, FSDPModule)
    for weight in trainer.model.parameters():
        assert isinstance(weight, DTensor)
        assert weight.device_mesh.size() == num_processes()


def train(folder: Path, names: list[str]) -> None:
    """Train cases one after the other, and write what they log."""
    results = {}
    for name in names:
        trainer, meter = trainer_for(f"{folder}/run", CASES[name])
        trainer.train()
        if num_processes() > 1:
            assert_sharded(trainer)
        if trainer.eval_dataset is not None:
            meter.losses.append(trainer.evaluate()["eval_loss"])
        results[name] = {"loss": meter.losses, "norm": meter.norms}
    if os.environ.get("RANK", "0") == "0":
        (folder / f"{num_processes()}.json").write_text(json.dumps(results))


def save(folder: Path, case: str, resume: str, **fields: Any) -> None:
    """Train four steps with a checkpoint after each second, or what is left of them, and write the last weights."""
    own = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, **fields}
    trainer, meter = trainer_for(str(folder), case, **own)
    trainer.train(resume_from_checkpoint=resume or None)
    trainer.save_model(str(folder / "final"))
    if num_processes() > 1:
        assert_sharded(trainer)
    weights = {name: whole_tensor(one.detach()).clone() for name, one in trainer.model.named_parameters()}
    if os.environ.get("RANK", "0") == "0":
        torch.save({"losses": meter.losses, "weights": weights}, folder / "after.pt")


RUN = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import json
from pathlib import Path
import sharded_trainers

verb, folder, *arguments = sys.argv[1:]
fields = json.loads(arguments.pop())
getattr(sharded_trainers, verb)(Path(folder), *([arguments] if verb == "train" else arguments), **fields)
"""
"""A program that calls one of the two."""


def run(forks: Forks, world: int, verb: str, folder: Path, *arguments: str, **fields: Any) -> None:
    """Call one of the two in so many processes; one is not launched."""
    given = (verb, str(folder), *arguments, json.dumps(fields))
    if world == 1:
        done = [forks.run(RUN, *given)]
    else:
        asked = CASES.get(arguments[0], arguments[0])
        done = launch(forks, world, RUN, *given, by_launch="by-script" not in asked)
    assert [process.returncode for process in done] == [0] * world, "".join(one.stderr for one in done)
