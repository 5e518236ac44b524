"""Traces in which a round stands for others like it, against traces of every round: memory, all work, the clock."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from ladder_rungs import RUNGS, settings_of
from sweeps import few_quick
from transformers import PretrainedConfig

from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.foundation.memory.memory_estimate import BudgetVerdict, MemoryEstimate
from lowmem_ft.optimizers.chunked import chunked_optimizer
from lowmem_ft.planning.estimator.traces import tracing
from lowmem_ft.recipe import load_recipe
from lowmem_ft.techniques import optimizer_in_backward
from lowmem_ft.techniques.streaming import embedding as streamed_embedding
from lowmem_ft.virtual_gpu import tracing_machine
from lowmem_ft.virtual_gpu.calls.trace import Trace
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.replay.timing import clock
from lowmem_ft.virtual_gpu.replay.trace_estimate import EstimateContext, estimate_on_cpu, estimate_on_gpu
from lowmem_ft.virtual_gpu.tracing_machine import TracingMachine

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
    "adafactor": ["optimizer.name=adafactor"],
    "adafactor-on-host": ["optimizer.name=adafactor", "offload.optimizer=host"],
    "state-on-host": ["model.dtype=bfloat16", "optimizer.master=split16", "offload.optimizer=host"],
    **{rung.name: [*settings_of(rung), "loss.chunk_tokens=8"] for rung in RUNGS},
}
QUICK = ("adafactor-on-host", "+ weights streamed")

SLOWER: dict[str, tuple[float, float]] = {
    "launches alone": (1.0, 1.0),
    "copies take longest": (1.0, 1e-6),
    "as long as computing": (1e-5, 1e-5),
    "computing takes longest": (1e-6, 1e-5),
}
"""Factors on the rates of a GPU and of its host link: the tensors are tiny, but the copies and kernels bind."""


def assert_rounds_equal_the_full_trace(
    folder: Path, family: str, technique: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[Trace, Trace]:
    """The trace in rounds and the full one, equal in memory and work."""
    for module, name in (
        (streamed_embedding, "_CHUNK_ELEMENTS"),
        (optimizer_in_backward, "_ELEMENTS_AT_ONCE"),
        (chunked_optimizer, "GPU_CHUNK_ELEMENTS"),
        (chunked_optimizer, "KERNEL_CHUNK_ELEMENTS"),
        (chunked_optimizer, "CPU_CHUNK_ELEMENTS"),
    ):
        monkeypatch.setattr(module, name, 768)
    FAMILIES[family]().save_pretrained(folder)
    recipe = load_recipe(
        "tiny",
        [
            f"model={folder}",
            "data.max_length=8",
            "loss.chunk_tokens=8",
            "training.per_device_train_batch_size=2",
            "training.gradient_accumulation_steps=5",
            *TECHNIQUES[technique],
        ],
    )

    def trace() -> Trace:
        virtual = TracingMachine() if kind == "cpu" else VirtualGPU(GPU)
        return tracing.trace_recipe(recipe, lambda: virtual, extend=False).trace

    in_rounds = trace()
    monkeypatch.setattr(tracing_machine, "abridged_for", lambda _: contextlib.nullcontext())
    full = trace()
    assert num_kernels(in_rounds) < num_kernels(full)
    assert totals(in_rounds) == totals(full)
    assert memory(estimate_of(in_rounds, kind)) == memory(estimate_of(full, kind))
    return in_rounds, full


def estimate_of(trace: Trace, kind: str) -> MemoryEstimate:
    if kind == "cpu":
        return estimate_on_cpu(trace, "cpu", BUDGET, EstimateContext())
    return estimate_on_gpu(trace, GPU, BUDGET, EstimateContext())


def memory(estimate: MemoryEstimate) -> dict[str, Any]:
    names = ("allocated_peak", "reserved_peak", "process_peak", "host_peak", "host_pinned")
    return {name: getattr(estimate, f"{name}_bytes") for name in names} | {
        "by_category": estimate.by_category_at_peak,
        "by_phase": estimate.by_phase,
        "at": (estimate.peak_phase, estimate.peak_module),
    }


def step_seconds(trace: Trace, compute: float, link: float) -> float:
    gpu = dataclasses.replace(
        GPU,
        dense_flops={dtype: rate * compute for dtype, rate in GPU.dense_flops.items()},
        bandwidth=GPU.bandwidth * compute,
        pcie_lanes=GPU.pcie_lanes * link,
    )
    before, end = trace.step_ends
    return clock.Clock(trace.work).times_on(gpu).between(before + 1, end + 1).seconds


def num_kernels(trace: Trace) -> int:
    return sum(entry.kind == "kernel" for entry in trace.work)


def totals(trace: Trace) -> dict[str, int]:
    return {
        "number": sum(entry.times for entry in trace.work if entry.kind in ("kernel", "copy")),
        "flops": sum(entry.flops * entry.times for entry in trace.work),
        "bytes": sum(entry.num_bytes * entry.times for entry in trace.work if entry.kind == "kernel"),
        "copied": sum(entry.num_bytes * entry.times for entry in trace.work if entry.kind == "copy"),
    }


@pytest.mark.parametrize("technique", few_quick(TECHNIQUES, QUICK))
def test_rounds_equal_the_full_trace_for_every_technique(
    technique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_rounds, full = assert_rounds_equal_the_full_trace(tmp_path, "llama", technique, "gpu", monkeypatch)
    for slower in SLOWER.values():
        mine, real = step_seconds(in_rounds, *slower), step_seconds(full, *slower)
        assert mine == pytest.approx(real, rel=1e-9), slower


@pytest.mark.parametrize("family", few_quick(FAMILIES, []))
def test_rounds_equal_the_full_trace_for_every_family(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_rounds_equal_the_full_trace(tmp_path, family, "streamed", "gpu", monkeypatch)


@pytest.mark.parametrize("technique", few_quick(["vertical", "inputs", "streamed"], ["inputs"]))
def test_rounds_equal_the_full_trace_on_a_cpu(
    technique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_rounds_equal_the_full_trace(tmp_path, "llama", technique, "cpu", monkeypatch)
