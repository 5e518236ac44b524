"""Programs of the trainers that people would pick: their own code, as installed, on a virtual GPU or a real one."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from speed.this_gpu import AnyGPU, ThisGPU  # first: what bitsandbytes says to no purpose is then left out

# isort: split
import bitsandbytes  # pyright: ignore[reportMissingImports]  # an optional package
import torch
from datasets import Dataset
from ground_truth.public_runs import PublicRun, model_on_meta
from peft import LoraConfig  # pyright: ignore[reportMissingImports]  # an optional package
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)
from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportMissingImports]  # an optional package

from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.hf_config import load_model_config
from lowmem_ft.models.loading import load_model
from lowmem_ft.virtual_gpu.gpu import VirtualGPU

ROWS, TOKENS = 16, 2048
"""Rows of a step, and tokens of a row."""


@dataclass(frozen=True, kw_only=True)
class MicroBatches:
    """The work of a step.

    Args:
        rows: rows of a micro-batch.
        number: micro-batches of a step.
        checkpoints: whether layers are checkpointed.
        steps: number of such steps.
    """

    rows: int
    number: int
    checkpoints: bool
    steps: int = 2


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another tool's program for a work.

    Args:
        title: the tool and its settings that do not change.
        model: name in the catalogue.
        run: runs steps of these micro-batches on a GPU.
        settings: rows of a micro-batch and whether layers are checkpointed.
        updates_each: whether every micro-batch is followed by an update.
    """

    title: str
    model: str
    run: Callable[[AnyGPU, str, MicroBatches], None]
    settings: tuple[tuple[int, bool], ...] = (
        (1, False),
        (2, False),
        (4, False),
        (1, True),
        (2, True),
        (4, True),
    )
    updates_each: bool = False


def train_in_full(gpu: AnyGPU, model: str, step: MicroBatches) -> None:
    """Fine-tune all weights with the stock Trainer, Liger's kernels and bitsandbytes' 8-bit AdamW."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, optim="adamw_bnb_8bit", **_common(step))
        Trainer(
            model=_model(gpu, model),
            args=arguments,
            train_dataset=_dataset(step),
            data_collator=default_data_collator,
            callbacks=_callbacks(gpu),
        ).train()


def train_adapters(gpu: AnyGPU, model: str, step: MicroBatches, *, quantization: str) -> None:
    """Train LoRA of rank 16 on all linear layers with TRL, PEFT, Liger's kernels and bitsandbytes."""
    with tempfile.TemporaryDirectory() as folder:
        SFTTrainer(
            model=_model(gpu, model, quantization),
            args=SFTConfig(folder, optim="adamw_torch_fused", max_length=TOKENS, **_common(step)),
            train_dataset=_dataset(step),
            callbacks=_callbacks(gpu),
            processing_class=_tokenizer(),
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        ).train()


def train_with_paged_state(gpu: AnyGPU, model: str, step: MicroBatches) -> None:
    """Update each weight in the backward pass by a paged 8-bit AdamW of its own, as torchtune's recipe does."""
    net: Any = _model(gpu, model)
    if step.checkpoints:
        net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for parameter in net.parameters():
        optimizer = bitsandbytes.optim.PagedAdamW8bit([parameter], lr=2e-5)
        parameter.register_post_accumulate_grad_hook(functools.partial(_update, optimizer=optimizer))
    ids_BT = torch.zeros(step.rows, TOKENS, dtype=torch.long, device=gpu.device)
    for _ in range(step.steps):
        for _ in range(step.number):
            net(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss.backward()
        if isinstance(gpu, ThisGPU):
            gpu.end_step()


def _update(parameter: torch.Tensor, *, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def _model(gpu: AnyGPU, name: str, quantization: str = "none") -> Any:
    """Return a model of the catalogue in bfloat16, with random weights if the GPU has any memory."""
    if isinstance(gpu, VirtualGPU):
        run = PublicRun(
            gpu=gpu.spec.name,
            model=name,
            dtype="bfloat16",
            quantization=quantization,
            batch_size=1,
            length=TOKENS,
        )
        return gpu.place(model_on_meta(run))
    config = ModelConfig(
        name_or_path=name,
        dtype="bfloat16",
        weights="random",
        quantization="nf4" if quantization == "nf4" else "none",
    )
    hf_config = load_model_config(config, architecture_only=True)
    model: Any = load_model(config, hf_config, attn_implementation="sdpa", device=gpu.device, seed=0)
    model.is_loaded_in_4bit = quantization != "none"
    return model


def _callbacks(gpu: AnyGPU) -> list[TrainerCallback]:
    return [_EndOfStep(gpu)] if isinstance(gpu, ThisGPU) else []


def _common(step: MicroBatches) -> dict[str, Any]:
    return {
        "bf16": True,
        "per_device_train_batch_size": step.rows,
        "gradient_accumulation_steps": step.number,
        "gradient_checkpointing": step.checkpoints,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "use_liger_kernel": True,
        "max_steps": step.steps,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }


def _dataset(step: MicroBatches) -> Dataset:
    tokens = list(range(2, 2 + TOKENS))
    row = {"input_ids": tokens, "labels": tokens}
    return Dataset.from_list([row] * (ROWS * step.steps))


def _tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that nothing asks: the rows are tokens already."""
    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


class _EndOfStep(TrainerCallback):
    def __init__(self, gpu: ThisGPU) -> None:
        self._gpu = gpu

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._gpu.end_step()


TRAINER = Peer(
    title="`Trainer`, Liger, bitsandbytes 8-bit AdamW; bfloat16 weights without a master",
    model="qwen3-8b",
    run=train_in_full,
)
SFT = Peer(
    title="TRL `SFTTrainer`, PEFT, Liger, fused AdamW",
    model="qwen2.5-7b",
    run=functools.partial(train_adapters, quantization="none"),
)
QLORA = dataclasses.replace(
    SFT,
    title="TRL `SFTTrainer`, PEFT, bitsandbytes NF4, Liger, fused AdamW",
    run=functools.partial(train_adapters, quantization="nf4"),
)
PAGED = Peer(
    title="torchtune's single-device recipe as a loop: no master, paged 8-bit AdamW in each micro-batch's backward",
    model="qwen3-8b",
    run=train_with_paged_state,
    settings=((1, True), (2, True), (4, True)),
    updates_each=True,
)
