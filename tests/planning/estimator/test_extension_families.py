"""A trace of a few layers, extended, against the trace of all of them: every family, technique and precision."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PretrainedConfig

from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.foundation.memory.memory_estimate import BudgetVerdict, MemoryEstimate
from lowmem_ft.planning.estimator.traces import tracing
from lowmem_ft.recipe import Recipe, load_recipe
from lowmem_ft.techniques.modules.model_parts import decoder_layers
from lowmem_ft.training.step.session import Session
from lowmem_ft.virtual_gpu.calls.trace import Trace
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.replay.trace_estimate import EstimateContext, estimate_on_cpu, estimate_on_gpu
from lowmem_ft.virtual_gpu.tracing_machine import TracingMachine

GPU = find_gpu("a100-80gb")
BUDGET = BudgetVerdict(device_bytes=GPU.memory_bytes, host_bytes=None)

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GATED: dict[str, Any] = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2}
WINDOWED: dict[str, Any] = {**GATED, "head_dim": 8, "sliding_window": 8}


def alternating(num_layers: int) -> list[str]:
    return [("sliding_attention", "full_attention")[index % 2] for index in range(num_layers)]


FAMILIES: dict[str, Callable[[int], PretrainedConfig]] = {
    "llama": lambda n: transformers.LlamaConfig(**GATED, num_hidden_layers=n),
    "qwen2": lambda n: transformers.Qwen2Config(**GATED, num_hidden_layers=n, tie_word_embeddings=True),
    "qwen3": lambda n: transformers.Qwen3Config(**GATED, head_dim=8, num_hidden_layers=n),
    "gemma2": lambda n: transformers.Gemma2Config(**WINDOWED, num_hidden_layers=n),
    "gemma3": lambda n: transformers.Gemma3TextConfig(
        **WINDOWED, num_hidden_layers=n, layer_types=alternating(n)
    ),
    "mistral": lambda n: transformers.MistralConfig(**WINDOWED, num_hidden_layers=n),
    "phi": lambda n: transformers.PhiConfig(**SIZES, intermediate_size=48, num_hidden_layers=n),
    "phi3": lambda n: transformers.Phi3Config(**GATED, num_hidden_layers=n),
    "gpt2": lambda n: transformers.GPT2Config(n_layer=n, n_embd=32, n_head=4, vocab_size=64, n_positions=64),
    "gpt-neox": lambda n: transformers.GPTNeoXConfig(**SIZES, intermediate_size=48, num_hidden_layers=n),
    "mixtral": lambda n: transformers.MixtralConfig(**GATED, num_local_experts=4, num_hidden_layers=n),
    "qwen3-moe": lambda n: transformers.Qwen3MoeConfig(
        **{**GATED, "head_dim": 8},
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=n,
    ),
}
ALTERNATING = ("gemma2", "gemma3")
"""Where layers alternate, the stand-in is deeper. With fewer layers, nothing is extended."""

SEVERAL = ["training.gradient_accumulation_steps=5"]
VERTICAL = [*SEVERAL, "accumulation.order=vertical", "loss.chunk_tokens=8"]
ON_HOST = [
    *(*VERTICAL, "model.dtype=bfloat16", "optimizer.master=split16", "optimizer.in_backward=true"),
    *("offload.optimizer=host", "offload.activations=inputs"),
]
LORA = ["adapter.name=lora", "adapter.r=4", "model.dtype=bfloat16"]
PLAIN = ["loss.chunk_tokens=null", "checkpointing.mode=none"]
TECHNIQUES: dict[str, list[str]] = {
    "checkpointed": ["loss.chunk_tokens=8"],
    "plain": PLAIN,
    "every-2-layers": ["checkpointing.every_n_layers=2"],
    "all-but-2-layers": ["checkpointing.skip_last_layers=2"],
    "all-but-9-layers": ["checkpointing.skip_last_layers=9"],
    "autocast": ["training.mixed_precision=bf16", "loss.chunk_tokens=8"],
    "autocast-plain": ["training.mixed_precision=bf16", *PLAIN],
    "bf16": ["model.dtype=bfloat16"],
    "packing": ["data.packing=true"],
    "accumulation": ["training.gradient_accumulation_steps=3"],
    "no-clipping": ["training.max_grad_norm=null"],
    "eager-attention": ["model.attn_implementation=eager"],
    "adamw-8-bit": ["optimizer.name=adamw_bnb_8bit"],
    "adafactor": ["optimizer.name=adafactor"],
    "lion": ["optimizer.name=lion"],
    "sgd": ["optimizer.name=sgd"],
    "vertical": VERTICAL,
    "inputs-on-host": [*SEVERAL, "offload.activations=inputs"],
    "in-backward-on-host": ON_HOST,
    "masters-on-host": [
        *(*SEVERAL, *PLAIN, "model.dtype=bfloat16", "optimizer.state=8bit", "optimizer.master=fp32"),
        *("optimizer.in_backward=false", "offload.optimizer=host"),
    ],
    "streamed": [*ON_HOST, "offload.parameters=stream"],
    "streamed-all-logits": [*ON_HOST, "offload.parameters=stream", "loss.chunk_tokens=null"],
    "streamed-not-clipped": [*ON_HOST, "offload.parameters=stream", "training.max_grad_norm=null"],
    "lora-streamed": [*LORA, *VERTICAL, "offload.activations=inputs", "offload.parameters=stream"],
    "some-resident": [*ON_HOST, "offload.parameters=stream", "offload.resident_layers=9"],
    "some-resident-tiles": [
        *ON_HOST,
        "offload.parameters=stream",
        "offload.resident_layers=9",
        "tiling.mlp=2",
        "tiling.head=3",
    ],
    "lora-some-resident": [*LORA, "offload.parameters=stream", "offload.resident_layers=9"],
    "three-kinds": [
        *(*LORA, *SEVERAL, "offload.parameters=stream", "offload.resident_layers=20"),
        *("checkpointing.skip_last_layers=9", "offload.activations=inputs"),
    ],
    "lora-state-on-host": [
        *(*LORA, *VERTICAL, "optimizer.in_backward=true", "offload.optimizer=host", "optimizer.state=bf16"),
        "training.max_grad_norm=null",
    ],
    "lora-one-streamed": [
        *(*LORA, "offload.parameters=stream", "offload.resident_layers=21"),
        "checkpointing.skip_last_layers=10",
    ],
}
COUNTED_BY_LAYERS = ["every-2-layers", "masters-on-host", "three-kinds", "lora-state-on-host"]
"""Those that `make test` tries; the slow test tries every technique with most families."""

SEVERAL_STRETCHES = [
    *("all-but-9-layers", "some-resident", "some-resident-tiles", "lora-some-resident"),
    *("three-kinds", "lora-one-streamed"),
]
"""Where the last layers repeat by themselves."""

DEEPER_TECHNIQUES = {
    "every-2-layers": 20,
    "all-but-2-layers": 20,
    **dict.fromkeys(SEVERAL_STRETCHES, 22),
    "three-kinds": 34,
    **dict.fromkeys(("inputs-on-host", "masters-on-host", "streamed-not-clipped", "lora-streamed"), 12),
    "lora-state-on-host": 16,
    **dict.fromkeys(("in-backward-on-host", "streamed", "streamed-all-logits"), 14),
}


def recipe_for(folder: Path, config: PretrainedConfig, settings: list[str]) -> Recipe:
    config.save_pretrained(folder)
    return load_recipe(
        "tiny",
        [
            f"model={folder}",
            "data.max_length=16",
            "data.eval_size=2",
            "training.per_device_train_batch_size=2",
            "training.gradient_accumulation_steps=1",
            *settings,
        ],
    )


def new_machine(kind: str) -> TracingMachine:
    return TracingMachine() if kind == "cpu" else VirtualGPU(GPU)


def estimate_of(trace: Trace, kind: str) -> MemoryEstimate:
    if kind == "cpu":
        return estimate_on_cpu(trace, "cpu", BUDGET, EstimateContext())
    return estimate_on_gpu(trace, GPU, BUDGET, EstimateContext())


def numbers(estimate: MemoryEstimate) -> dict[str, Any]:
    """All that an estimate says, but for its timeline as traced and played, whose frees may come in another order, and
    the time it took."""
    fields = {field.name: getattr(estimate, field.name) for field in dataclasses.fields(estimate)}
    return {
        name: value for name, value in fields.items() if name not in ("timeline", "playback", "trace_seconds")
    }


def totals(trace: Trace) -> dict[str, int]:
    return {
        "allocations": len(trace.timeline.allocations),
        "events": len(trace.timeline.events),
        "work": len(trace.work),
        "flops": sum(entry.flops for entry in trace.work),
        "bytes": sum(entry.num_bytes for entry in trace.work),
    }


@pytest.fixture(autouse=True)
def _reasons(caplog: pytest.LogCaptureFixture) -> None:
    """Why few layers do not stand for all stands beside a failure."""
    caplog.set_level(logging.INFO, tracing.__name__)


def assert_equal_to_full_trace(recipe: Recipe, kind: str) -> None:
    mine = tracing.trace_recipe(recipe, lambda: new_machine(kind)).trace
    full = tracing.trace_recipe(recipe, lambda: new_machine(kind), extend=False).trace
    assert totals(mine) == totals(full)
    assert numbers(estimate_of(mine, kind)) == numbers(estimate_of(full, kind))


def check(folder: Path, family: str, technique: str, kind: str, traced_depths: list[int]) -> None:
    num_layers = DEEPER_TECHNIQUES.get(technique, 10)
    if family in ALTERNATING:
        num_layers = max(16, 2 * num_layers - 8)
    recipe = recipe_for(folder, FAMILIES[family](num_layers), TECHNIQUES[technique])
    assert_equal_to_full_trace(recipe, kind)
    *for_extension, full = traced_depths
    assert full == num_layers
    if family in ALTERNATING and technique in SEVERAL_STRETCHES:
        return  # layers that alternate in several stretches are traced whole
    assert for_extension  # else nothing was extended
    assert max(for_extension) < num_layers


def test_extended_equals_full_where_layers_alternate(tmp_path: Path, traced_depths: list[int]) -> None:
    check(tmp_path, "gemma2", "autocast-plain", "gpu", traced_depths)


@pytest.mark.parametrize("technique", COUNTED_BY_LAYERS)
def test_extended_equals_full_for_techniques_that_count_layers_or_wait_on_the_host(
    technique: str, tmp_path: Path, traced_depths: list[int]
) -> None:
    check(tmp_path, "llama", technique, "gpu", traced_depths)


def test_extended_equals_full_for_adapters_of_streamed_experts(
    tmp_path: Path, traced_depths: list[int]
) -> None:
    """What PEFT is shown in place of the experts' weights is one element, and not one for each layer."""
    pytest.importorskip("bitsandbytes")
    experts = [*TECHNIQUES["lora-some-resident"], "model.quantization=nf4"]
    assert_equal_to_full_trace(recipe_for(tmp_path, FAMILIES["qwen3-moe"](22), experts), "gpu")
    assert max(traced_depths[:-1]) < 22


def test_extended_equals_full_on_a_cpu(tmp_path: Path, traced_depths: list[int]) -> None:
    check(tmp_path, "gpt2", "checkpointed", "cpu", traced_depths)


ALIKE = ("qwen3", "gemma3", "mistral", "phi", "phi3")
"""Their layers differ little from those of others: each technique is tried with one of them."""


def pairs() -> Iterator[tuple[str, str, str]]:
    """Yield techniques with families, every fourth pair on a CPU, so that each of both is tried there too."""
    for column, technique in enumerate(TECHNIQUES):
        others = [family for family in FAMILIES if family not in ALIKE]
        for row, family in enumerate([*others, ALIKE[column % len(ALIKE)]]):
            yield family, technique, "cpu" if (row + column) % 4 == 0 else "gpu"


@pytest.mark.slow
@pytest.mark.parametrize("family, technique, kind", pairs())
def test_extended_equals_full_everywhere(
    family: str, technique: str, kind: str, tmp_path: Path, traced_depths: list[int]
) -> None:
    check(tmp_path, family, technique, kind, traced_depths)


# --- what does not repeat ---------------------------------------------------------------------------------------------


def test_an_odd_layer_deep_in_the_stack_is_traced(tmp_path: Path, traced_depths: list[int]) -> None:
    types = ["sliding_attention"] * 12
    types[8] = "full_attention"
    config = transformers.Gemma3TextConfig(**WINDOWED, num_hidden_layers=12, layer_types=types)
    assert_equal_to_full_trace(recipe_for(tmp_path, config, PLAIN), "gpu")
    assert traced_depths == [12, 12]


def test_dense_layers_before_those_with_experts_are_no_obstacle(
    tmp_path: Path, traced_depths: list[int]
) -> None:
    config = transformers.DeepseekV3Config(
        **{**SIZES, "intermediate_size": 48},
        num_hidden_layers=12,
        first_k_dense_replace=1,
        moe_intermediate_size=16,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )
    assert_equal_to_full_trace(recipe_for(tmp_path, config, PLAIN), "gpu")
    assert max(traced_depths[:-1]) < 12


@pytest.mark.parametrize(
    "is_chosen",
    [
        pytest.param(lambda index, count: index % 2 == 0, id="every-other-layer", marks=pytest.mark.slow),
        pytest.param(lambda index, count: index < count // 2, id="first-half", marks=pytest.mark.slow),
        pytest.param(lambda index, count: index == count // 2, id="middle"),
    ],
)
def test_a_technique_that_depends_on_depth_and_does_not_say_so_is_caught(
    is_chosen: Callable[[int, int], bool],
    tmp_path: Path,
    traced_depths: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build = tracing.build_session

    def build_with_unknown_technique(*args: Any, **kwargs: Any) -> Session:
        session = build(*args, **kwargs)
        layers = decoder_layers(session.unwrapped_model)
        for index, layer in enumerate(layers):
            if is_chosen(index, len(layers)):
                layer.register_forward_hook(_keep_another_activation)
        return session

    monkeypatch.setattr(tracing, "build_session", build_with_unknown_technique)
    assert_equal_to_full_trace(recipe_for(tmp_path, FAMILIES["llama"](14), PLAIN), "gpu")
    assert traced_depths[-2:] == [14, 14]


def _keep_another_activation(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output.exp().sigmoid()
