"""Adapters and quantised weights: the estimate beside real steps, and what it shows of them on a GPU."""

from __future__ import annotations

import dataclasses

import pytest
from tiny_models import save_llama

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

from measuring.comparison import estimated_peaks
from measuring.real_run import run_for_real

from lowmem_ft.planning.estimator import estimate_memory
from lowmem_ft.planning.estimator.traces.tracing import trace_recipe
from lowmem_ft.recipe import load_recipe
from lowmem_ft.virtual_gpu.gpu import VirtualGPU

ALLOWED_ERROR = 0.001
"""bitsandbytes makes a table of 1 KiB once in a process."""
HIDDEN, INNER, LAYERS, VOCABULARY = 128, 256, 2, 512
LINEAR_WEIGHTS = LAYERS * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER)


@pytest.fixture
def make_recipe(tmp_path):
    def make(*settings, num_layers=LAYERS):
        save_llama(tmp_path, layers=num_layers, hidden=HIDDEN, inner=INNER, heads=4, vocab_size=VOCABULARY)
        always = (f"model={tmp_path}", "data.max_length=128", "checkpointing.mode=full", "adapter.name=lora")
        return load_recipe(None, [*always, *settings])

    return make


@pytest.mark.parametrize(
    "settings",
    [
        (),
        pytest.param(("model.dtype=bfloat16", "training.mixed_precision=bf16"), marks=pytest.mark.slow),
        pytest.param(("model.dtype=bfloat16", "adapter.use_dora=true"), marks=pytest.mark.slow),
        ("model.quantization=nf4", "model.dtype=bfloat16", "training.mixed_precision=bf16"),
        ("model.quantization=nf4", "adapter.use_dora=true"),
        ("adapter.modules_to_save=[embed_tokens, lm_head]", "model.dtype=bfloat16"),
    ],
    ids=" ".join,
)
def test_each_phase_takes_what_was_estimated(make_recipe, settings):
    recipe = make_recipe("model.weights=random", "training.use_cpu=true", *settings)
    measured = dataclasses.asdict(run_for_real(recipe))["allocated"]
    estimated = estimated_peaks(estimate_memory(recipe, "cpu"))["allocated"]
    assert estimated == pytest.approx(measured, rel=ALLOWED_ERROR)


@pytest.mark.parametrize("weights", ["pretrained", pytest.param("random", marks=pytest.mark.slow)])
def test_on_a_gpu_quantisation_frees_what_it_says(make_recipe, weights):
    def parameters(quantization):
        recipe = make_recipe(
            "model.dtype=bfloat16", f"model.quantization={quantization}", f"model.weights={weights}"
        )
        return estimate_memory(recipe, "a100-80gb").by_category_at_peak["parameter"]

    blocks = 7 * LAYERS * 6 * 512  # the allocator rounds scales, offsets and tables up to 512 bytes
    whole = parameters("none")
    assert 0 <= LINEAR_WEIGHTS * 1.48 - (whole - parameters("nf4")) <= blocks
    assert 0 <= LINEAR_WEIGHTS * 1.00 - (whole - parameters("int8")) <= blocks


def test_only_adapters_have_gradients_and_state(make_recipe):
    estimate = estimate_memory(make_recipe("model.quantization=nf4"), "l4")
    trained = LAYERS * 16 * (4 * 2 * HIDDEN + 3 * (HIDDEN + INNER))
    assert estimate.model.trainable_parameters == trained
    assert (
        estimate.model.parameters
        == trained + LINEAR_WEIGHTS + 2 * VOCABULARY * HIDDEN + (2 * LAYERS + 1) * HIDDEN
    )
    assert trained * 8 <= estimate.by_category_at_peak["optimizer_state"] < trained * 8.5
    assert any("linear layers in nf4, adapters of rank 16" in choice for choice in estimate.choices)


def test_modules_saved_whole_have_gradients_masters_and_state(make_recipe):
    one, other = (
        estimate_memory(make_recipe("model.dtype=bfloat16", "model.quantization=nf4", *settings), "l4")
        for settings in ((), ("adapter.modules_to_save=[embed_tokens]",))
    )
    table = VOCABULARY * HIDDEN
    assert other.model.trainable_parameters - one.model.trainable_parameters == table
    state = [each.by_category_at_peak["optimizer_state"] for each in (one, other)]
    assert table * 12 <= state[1] - state[0] < table * 12.5  # a float32 master, and AdamW's two moments
    assert any("adapters of rank 16, embed_tokens trained whole" in choice for choice in other.choices)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [(), ("model.quantization=nf4",), ("adapter.use_dora=true",)], ids=" ".join
)
def test_a_few_layers_stand_for_all(make_recipe, settings):
    """Else the estimate of a deep model takes minutes."""
    recipe = make_recipe("model.dtype=bfloat16", "training.mixed_precision=bf16", *settings, num_layers=10)
    machines = []

    def machine():
        machines.append(VirtualGPU("a100-80gb"))
        return machines[-1]

    extended = trace_recipe(recipe, machine).trace
    assert len(machines) == 2
    whole = trace_recipe(recipe, machine, extend=False).trace
    assert extended.timeline.allocations == whole.timeline.allocations
    assert at_births(extended.timeline) == at_births(whole.timeline)


def at_births(timeline):
    """Live bytes after each allocation; frees in between come in any order."""
    live = zip(timeline.events, timeline.live_bytes(), strict=True)
    return [num_bytes for (kind, _), num_bytes in live if kind == "malloc"]
