"""Estimates of mixtures whose experts compute one after the other, compared with real steps of a known routing."""

import functools
import io
import json

import pytest
import torch
from measuring.real_run import run_for_real
from rich.console import Console
from transformers import AutoConfig

from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.foundation.memory.analysis import peak_by_phase
from lowmem_ft.planning.estimator import estimate_memory
from lowmem_ft.planning.estimator.traces.tracing import trace_recipe
from lowmem_ft.recipe import load_recipe
from lowmem_ft.reports.estimate_table import estimate_table
from lowmem_ft.virtual_gpu.tracing_machine import TracingMachine
from lowmem_ft.virtual_gpu.values.routing import picked

ALLOWED_ERROR = 0.005
E, K, SIZE, INNER = 8, 2, 64, 512
_SIZES = {"vocab_size": 256, "num_hidden_layers": 1, "max_position_embeddings": 512}
FAMILIES = {
    "mixtral": {
        **_SIZES,
        "experts_implementation": "eager",
        "hidden_size": SIZE,
        "intermediate_size": INNER,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": E,
        "num_experts_per_tok": K,
    },
    "dbrx": {
        "vocab_size": 256,
        "n_layers": 1,
        "d_model": SIZE,
        "n_heads": 4,
        "max_seq_len": 512,
        "ffn_config": {"ffn_hidden_size": INNER, "moe_num_experts": 2 * E, "moe_top_k": 2 * K},
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
    },
    "jetmoe": {
        **_SIZES,
        "hidden_size": SIZE,
        "intermediate_size": INNER,
        "num_key_value_heads": 2,
        "kv_channels": 16,
        "num_local_experts": E,
        "num_experts_per_tok": K,
    },
}


@pytest.fixture
def recipe_of(tmp_path):
    def load(family, *overrides):
        fields = dict(FAMILIES[family])
        experts = fields.pop("experts_implementation", None)
        AutoConfig.for_model(family, **fields).save_pretrained(tmp_path)
        file = tmp_path / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "experts_implementation": experts}))
        settings = [f"model={tmp_path}", "model.weights=random", "training.use_cpu=true", "data=any"]
        return load_recipe(None, [*settings, "data.max_length=256", *overrides])

    return load


def route_for_real(monkeypatch, pick):
    def topk(scores, k, dim=-1, **_):
        indices = pick(scores, k, dim)
        return torch.return_types.topk((scores.gather(dim, indices), indices))

    monkeypatch.setattr(torch, "topk", topk)
    monkeypatch.setattr(torch.Tensor, "topk", topk)


def peaks_of_trace(recipe, routing):
    timeline = trace_recipe(recipe, functools.partial(TracingMachine, routing=routing)).trace.timeline
    return peak_by_phase(timeline, list(timeline.live_bytes()))


CHECKPOINTED = "checkpointing.mode=full"


@pytest.mark.parametrize(
    "family, routing, overrides",
    [
        ("mixtral", "uneven", (CHECKPOINTED, "training.mixed_precision=bf16")),
        ("mixtral", "balanced", ()),
        ("dbrx", "uneven", (CHECKPOINTED, "model.dtype=bfloat16")),
        ("jetmoe", "uneven", ()),
        pytest.param("mixtral", "uneven", (), marks=pytest.mark.slow),
        pytest.param("dbrx", "balanced", (), marks=pytest.mark.slow),
        pytest.param("jetmoe", "balanced", (CHECKPOINTED,), marks=pytest.mark.slow),
    ],
)
def test_a_real_step_takes_what_was_estimated_for_its_routing(
    family, routing, overrides, recipe_of, monkeypatch
):
    recipe = recipe_of(family, *overrides)
    estimated = peaks_of_trace(recipe, routing)
    route_for_real(monkeypatch, functools.partial(picked, routing=routing))
    assert run_for_real(recipe).allocated == pytest.approx(estimated, rel=ALLOWED_ERROR)


@pytest.mark.parametrize(
    "find", [run_for_real, functools.partial(estimate_memory, gpu="cpu")], ids=["run", "estimate"]
)
def test_dbrx_writes_no_results_of_autocast(find, recipe_of):
    recipe = recipe_of("dbrx", "training.mixed_precision=bf16")
    with pytest.raises(
        ModelError, match=r"mixed_precision=bf16 .* DbrxForCausalLM does not: index_add_.*precision=no"
    ):
        find(recipe)


def at_random(scores, k, dim, *, exponent):
    """Let each token take experts by weights, the farther apart the higher the exponent."""
    generator = torch.Generator().manual_seed(3)
    weights = torch.rand(scores.shape[-1], generator=generator) ** exponent + 1e-6
    return torch.multinomial(weights.expand(len(scores), -1), k, generator=generator)


def all_alike(scores, k, dim, *, first):
    return torch.arange(first, first + k).expand(len(scores), k)


BALANCED = functools.partial(picked, routing="balanced")
FEW = functools.partial(at_random, exponent=8.0)
MOST = functools.partial(at_random, exponent=1.0)
FIRST, LAST = functools.partial(all_alike, first=0), functools.partial(all_alike, first=E - K)


@pytest.mark.parametrize(
    "family, pick",
    [
        ("mixtral", BALANCED),
        ("dbrx", FEW),
        *(pytest.param("mixtral", pick, marks=pytest.mark.slow) for pick in (FEW, MOST, FIRST, LAST)),
        *(pytest.param("dbrx", pick, marks=pytest.mark.slow) for pick in (BALANCED, MOST, FIRST, LAST)),
    ],
)
def test_no_other_routing_takes_more(family, pick, recipe_of, monkeypatch):
    bfloat16 = ("model.dtype=bfloat16", "training.per_device_train_batch_size=2")
    recipe = recipe_of(family, CHECKPOINTED, *bfloat16)
    estimated = estimate_memory(recipe, "cpu").allocated_peak_bytes
    route_for_real(monkeypatch, pick)
    taken = max(run_for_real(recipe).allocated.values())
    assert 0.8 * estimated < taken <= estimated


def text_of(estimate):
    console = Console(width=200, file=io.StringIO())
    console.print(estimate_table(estimate))
    return console.file.getvalue()


def test_the_balanced_peak_is_told_where_it_differs(recipe_of):
    frozen = ("adapter.name=lora", "adapter.target_modules=[q_proj]", "data.max_length=512")
    estimate = estimate_memory(
        recipe_of("mixtral", *frozen, "training.per_device_train_batch_size=64"), "cpu"
    )
    assert estimate.balanced_peak_bytes is not None
    assert estimate.balanced_peak_bytes < 0.99 * estimate.process_peak_bytes
    assert estimate.to_json()["device"]["balanced_peak_bytes"] == estimate.balanced_peak_bytes
    assert "routing" in text_of(estimate)


def test_nothing_is_told_where_the_balanced_peak_is_the_same(recipe_of):
    estimate = estimate_memory(recipe_of("jetmoe"), "cpu")
    assert estimate.balanced_peak_bytes is None
    assert "routing" not in text_of(estimate)
