"""Traces in which a round stands for others like it, against traces of every round: memory to the byte, all work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import PretrainedConfig

from lowmem_ft.catalog.gpus import find_gpu
from lowmem_ft.estimator import tracing
from lowmem_ft.memory.estimate import BudgetVerdict, MemoryEstimate
from lowmem_ft.recipe import load_recipe
from lowmem_ft.techniques.streaming import embedding as streamed_embedding
from lowmem_ft.virtual_gpu import machine
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.machine import VirtualMachine
from lowmem_ft.virtual_gpu.replay.estimate import Surroundings, estimate_on_cpu, estimate_on_gpu
from lowmem_ft.virtual_gpu.trace import Trace

GPU = find_gpu("a100-80gb")
BUDGET = BudgetVerdict(device_bytes=GPU.memory_bytes, host_bytes=None)
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 160,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GATED: dict[str, Any] = {**SIZES, "num_key_value_heads": 2}
FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**GATED),
    "qwen2-tied": lambda: transformers.Qwen2Config(**GATED, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**GATED, head_dim=8),
    "gemma2": lambda: transformers.Gemma2Config(**GATED, head_dim=8, sliding_window=8),
    "phi": lambda: transformers.PhiConfig(**SIZES),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**SIZES),
    "mixtral": lambda: transformers.MixtralConfig(**GATED, num_local_experts=4),
}

VERTICAL = ["accumulation.order=vertical"]
INPUTS = [*VERTICAL, "offload.activations=inputs"]
IN_BACKWARD = [*INPUTS, "model.dtype=bfloat16", "optimizer.master=split16", "optimizer.in_backward=true"]
ON_HOST = [*IN_BACKWARD, "offload.optimizer=host"]
STREAMED = [*ON_HOST, "offload.parameters=stream"]
LORA = [*INPUTS, "adapter.name=lora", "adapter.r=4", "model.dtype=bfloat16"]
NOT_CLIPPED = ["training.max_grad_norm=null"]
TECHNIQUES: dict[str, list[str]] = {
    "horizontal": ["tiling.head=3", "loss.chunk_tokens=2"],
    "vertical": VERTICAL,
    "vertical-autocast": [*VERTICAL, "training.mixed_precision=bf16"],
    "selective": [*VERTICAL, "checkpointing.mode=selective", "model.dtype=bfloat16"],
    "one-row": [*VERTICAL, "training.per_device_train_batch_size=1"],
    "packed": [*VERTICAL, "data.packing=true"],
    "whole-logits": [*VERTICAL, "loss.chunk_tokens=null"],
    "tiles": [*INPUTS, "tiling.mlp=2", "tiling.head=3", "model.dtype=bfloat16"],
    "inputs": INPUTS,
    "all-activations": [*VERTICAL, "offload.activations=all"],
    "in-backward": IN_BACKWARD,
    "in-backward-not-clipped": [*IN_BACKWARD, *NOT_CLIPPED],
    "on-host": ON_HOST,
    "streamed": STREAMED,
    "streamed-not-clipped": [*STREAMED, *NOT_CLIPPED],
    "streamed-tiles": [*STREAMED, "tiling.mlp=2", "tiling.head=3"],
    "streamed-one-resident": [*STREAMED, "offload.resident_layers=1"],
    "lora": LORA,
    "lora-streamed": [*LORA, "offload.parameters=stream"],
}
QUICK = ("horizontal", "selective", "tiles", "lora-streamed")


def few_quick(names: Iterable[str], quick: Sequence[str]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in quick else [pytest.mark.slow]) for name in names]


def compare(
    folder: Path, family: str, technique: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[MemoryEstimate, MemoryEstimate]:
    """The estimate in rounds and the full one, equal in all but time."""
    monkeypatch.setattr(streamed_embedding, "_CHUNK_ELEMENTS", 512)
    FAMILIES[family]().save_pretrained(folder)
    recipe = load_recipe(
        "tiny",
        [
            f"model={folder}",
            "data.max_length=8",
            "loss.chunk_tokens=8",
            "training.per_device_train_batch_size=2",
            "training.gradient_accumulation_steps=4",
            *TECHNIQUES[technique],
        ],
    )

    def trace() -> Trace:
        virtual = VirtualMachine() if kind == "cpu" else VirtualGPU(GPU)
        return tracing.trace_recipe(recipe, lambda: virtual, extend=False).trace

    in_rounds = trace()
    monkeypatch.setattr(machine, "abridged_for", lambda _: contextlib.nullcontext())
    full = trace()
    assert len(in_rounds.work) < len(full.work)
    assert totals(in_rounds) == totals(full)
    mine, real = estimate_of(in_rounds, kind), estimate_of(full, kind)
    assert memory(mine) == memory(real)
    return mine, real


def estimate_of(trace: Trace, kind: str) -> MemoryEstimate:
    if kind == "cpu":
        return estimate_on_cpu(trace, "cpu", BUDGET, Surroundings())
    return estimate_on_gpu(trace, GPU, BUDGET, Surroundings())


def memory(estimate: MemoryEstimate) -> dict[str, Any]:
    names = ("allocated_peak", "reserved_peak", "process_peak", "host_peak", "host_pinned")
    return {name: getattr(estimate, f"{name}_bytes") for name in names} | {
        "by_category": estimate.by_category_at_peak,
        "by_phase": estimate.by_phase,
        "at": (estimate.peak_phase, estimate.peak_module),
    }


def totals(trace: Trace) -> dict[str, int]:
    return {
        "flops": sum(entry.flops * entry.times for entry in trace.work),
        "bytes": sum(entry.num_bytes * entry.times for entry in trace.work if entry.kind == "kernel"),
        "copied": sum(entry.num_bytes * entry.times for entry in trace.work if entry.kind == "copy"),
    }


@pytest.mark.parametrize("technique", few_quick(TECHNIQUES, QUICK))
def test_rounds_equal_the_full_trace_for_every_technique(
    technique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, real = compare(tmp_path, "llama", technique, "gpu", monkeypatch)
    assert mine.step is not None
    assert real.step is not None
    assert mine.step.seconds == pytest.approx(real.step.seconds, rel=1e-9)


@pytest.mark.parametrize("family", few_quick(FAMILIES, ["qwen2-tied"]))
def test_rounds_equal_the_full_trace_for_every_family(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(tmp_path, family, "streamed", "gpu", monkeypatch)


@pytest.mark.parametrize("technique", few_quick(["vertical", "inputs", "streamed"], ["streamed"]))
def test_rounds_equal_the_full_trace_on_a_cpu(
    technique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(tmp_path, "llama", technique, "cpu", monkeypatch)
