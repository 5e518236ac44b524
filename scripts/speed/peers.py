"""Programs of the trainers that people would pick: their own code, as installed, on a virtual GPU or a real one."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from speed.this_gpu import AnyGPU, ThisGPU  # first: what bitsandbytes says to no purpose is then left out

# isort: split
import bitsandbytes  # pyright: ignore[reportMissingImports]  # an optional package
import torch
from datasets import Dataset
from liger_kernel.transformers.functional import (  # pyright: ignore[reportMissingImports]  # an optional package
    liger_fused_linear_cross_entropy,
)
from measuring.measured_rows import Documents, MeasuredRows
from measuring.public_runs import PublicRun, model_on_meta
from peft import LoraConfig  # pyright: ignore[reportMissingImports]  # an optional package
from speed.peer_settings import TOKENS, Setting, all_settings
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

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.hf_config import load_model_config
from lowmem_ft.models.loading import load_model
from lowmem_ft.virtual_gpu.gpu import VirtualGPU

LIGERS_CHUNKS = 16
"""Factor by which the chunks of Liger's fused head are longer than by default with the head ``wide``: two of 2,048
tokens, for two rows of Qwen3's vocabulary, in place of 32 of 128."""


@dataclass(frozen=True, kw_only=True)
class MicroBatches:
    """The work of some steps.

    Args:
        setting: what the tool's user chooses.
        number: micro-batches of a step.
        documents: tokens of each document of a row.
        steps: number of such steps.
    """

    setting: Setting
    number: int
    documents: Documents = (TOKENS,)
    steps: int = 2


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another tool's program for a work.

    Args:
        title: the tool and its settings that do not change.
        model: name in the catalogue.
        program: trains a model by that name, for some steps, on a GPU.
        settings: what can be chosen.
        updates_each: whether every micro-batch is followed by an update.
    """

    title: str
    model: str
    program: Callable[[AnyGPU, str, MicroBatches], None]
    settings: tuple[Setting, ...]
    updates_each: bool = False

    def run(self, gpu: AnyGPU, step: MicroBatches, *, model: str | None = None) -> None:
        """Run some steps.

        Args:
            gpu: where.
            step: the steps.
            model: another model, by its name or folder.

        Raises:
            UserError: if the tool has no such setting, or a virtual GPU would not see what it does.
        """
        setting = step.setting
        if dataclasses.replace(setting, rows=self.settings[0].rows) not in self.settings:
            raise UserError(f"{self.title} has no setting {setting}; those it has: {_listed(self.settings)}.")
        if setting.compiled and isinstance(gpu, VirtualGPU):
            raise UserError(
                f"{setting}: torch.compile does nothing on a virtual GPU, as Dynamo skips every frame that runs under "
                "a dispatch mode, and the time would be that without it. Leave :compiled out, or measure."
            )
        self.program(gpu, self.model if model is None else model, step)


def train_in_full(gpu: AnyGPU, model: str, step: MicroBatches) -> None:
    """Fine-tune all weights with the stock Trainer, Liger's kernels and bitsandbytes' 8-bit AdamW."""
    net = _model(gpu, model)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, optim="adamw_bnb_8bit", **_common(gpu, step))
        Trainer(
            model=net,
            args=arguments,
            train_dataset=_dataset(net, step),
            data_collator=_collator_with_wide_chunks
            if step.setting.head == "wide"
            else default_data_collator,
            callbacks=_callbacks(gpu),
        ).train()


def train_adapters(gpu: AnyGPU, model: str, step: MicroBatches, *, quantization: str) -> None:
    """Train LoRA of rank 16 on all linear layers with TRL, PEFT, Liger's kernels and bitsandbytes.

    Rows of several documents are collated by transformers: TRL's collator takes no positions.
    """
    net = _model(gpu, model, quantization)
    several = len(step.documents) > 1
    with tempfile.TemporaryDirectory() as folder:
        SFTTrainer(
            model=net,
            args=SFTConfig(
                folder,
                optim="adamw_torch_fused",
                max_length=sum(step.documents),
                remove_unused_columns=not several,
                **_common(gpu, step),
            ),
            train_dataset=_dataset(net, step),
            data_collator=default_data_collator if several else None,
            callbacks=_callbacks(gpu),
            processing_class=_tokenizer(),
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        ).train()


def train_with_paged_state(gpu: AnyGPU, model: str, step: MicroBatches) -> None:
    """Update each weight in the backward pass by a paged 8-bit AdamW of its own, as torchtune's recipe does.

    Compiled, it compiles each layer by itself, as that recipe does, too.
    """
    net: Any = _model(gpu, model)
    if step.setting.checkpoints:
        net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if step.setting.compiled:
        for layer in net.model.layers:
            layer.compile()
    for parameter in net.parameters():
        optimizer = bitsandbytes.optim.PagedAdamW8bit([parameter], lr=2e-5)
        parameter.register_post_accumulate_grad_hook(functools.partial(_update, optimizer=optimizer))
    rows, per_micro_batch = MeasuredRows.of(net.config, step.documents), step.setting.rows
    for index in range(step.steps * step.number):
        numbers = range(index * per_micro_batch, (index + 1) * per_micro_batch)
        batch = default_data_collator([rows.columns(number) for number in numbers])
        batch = {name: tensor.to(gpu.device) for name, tensor in batch.items()}
        net(**batch, use_cache=False).loss.backward()
        if isinstance(gpu, ThisGPU) and not (index + 1) % step.number:
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


def _common(gpu: AnyGPU, step: MicroBatches) -> dict[str, Any]:
    setting = step.setting
    without_fused_head = {"fused_linear_cross_entropy": False, "cross_entropy": True}
    return {
        "bf16": True,
        "use_cpu": gpu.device.type == "cpu",
        "per_device_train_batch_size": setting.rows,
        "gradient_accumulation_steps": step.number,
        "gradient_checkpointing": setting.checkpoints,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "torch_compile": setting.compiled,
        "use_liger_kernel": setting.head != "stock",
        "liger_kernel_config": without_fused_head if setting.head == "whole" else None,
        "train_sampling_strategy": "sequential",
        "max_steps": step.steps,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }


def _collator_with_wide_chunks(examples: list[Any]) -> dict[str, Any]:
    """Collate, and hand Liger's fused head the length of its chunks, which is an argument of the model's forward."""
    if "chunk_mem_const" not in inspect.signature(liger_fused_linear_cross_entropy).parameters:
        raise UserError(
            f"liger-kernel {version('liger-kernel')} does not let its users choose the chunks of its fused head; "
            "leave :wide out."
        )
    return {**default_data_collator(examples), "chunk_mem_const": LIGERS_CHUNKS}


def _dataset(net: Any, step: MicroBatches) -> Dataset:
    rows, number = MeasuredRows.of(net.config, step.documents), step.setting.rows * step.number * step.steps
    return Dataset.from_list([rows.columns(index) for index in range(number)])


def _listed(settings: Sequence[Setting]) -> str:
    return ", ".join(map(str, settings))


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
    program=train_in_full,
    settings=all_settings(heads=("own", "whole", "wide", "stock")),
)
SFT = Peer(
    title="TRL `SFTTrainer`, PEFT, Liger, fused AdamW",
    model="qwen2.5-7b",
    program=functools.partial(train_adapters, quantization="none"),
    settings=all_settings(heads=("own", "stock")),
)
QLORA = dataclasses.replace(
    SFT,
    title="TRL `SFTTrainer`, PEFT, bitsandbytes NF4, Liger, fused AdamW",
    program=functools.partial(train_adapters, quantization="nf4"),
)
PAGED = Peer(
    title="torchtune's single-device recipe as a loop: no master, paged 8-bit AdamW in each micro-batch's backward",
    model="qwen3-8b",
    program=train_with_paged_state,
    settings=all_settings(checkpoints=(True,)),
    updates_each=True,
)
