"""What is chosen for a GPU, beside every setting of a grid that fits there, each estimated by itself."""

from __future__ import annotations

import itertools

import pytest
from tiny_models import save_llama

from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.planning.estimator import CannotRun, estimate_methods
from lowmem_ft.planning.estimator.estimate import SharedTraces
from lowmem_ft.planning.estimator.traces.trace_cache import KeptTraces
from lowmem_ft.recipe import load_recipe
from lowmem_ft.recipe.gpu_count import on_gpus

LAYERS = 2
BUDGET = "budget.device=5GiB"
"""On a smaller GPU: less than all layers take that keep the activations of one row."""
CHECKPOINTING = {
    "none": ("checkpointing.mode=none", "checkpointing.skip_last_layers=0"),
    "half": ("checkpointing.mode=full", f"checkpointing.skip_last_layers={LAYERS // 2}"),
    "full": ("checkpointing.mode=full", "checkpointing.skip_last_layers=0"),
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> str:
    """A few layers of an 8B model."""
    path = tmp_path_factory.mktemp("wide")
    return save_llama(
        path, layers=LAYERS, hidden=4096, inner=14336, heads=32, num_key_value_heads=8, vocab_size=32000
    )


@pytest.fixture(scope="module")
def kept() -> KeptTraces:
    return KeptTraces()


def chosen(model: str, method: str, gpus, kept, *settings: str):
    of_method = {
        "full": ["adapter.name=none"],
        "lora": ["adapter.name=lora"],
        "qlora": ["model.quantization=nf4"],
    }
    results = estimate_methods(
        model, [find_gpu(name) for name in gpus], settings=[*of_method[method], *settings], kept=kept
    )
    return {result.gpu.name: result for result in results}


def by_hand(result, rows, checkpointing, kernels, kept):
    """Return tokens a second with other settings in a printed command, on each GPU that they fit on."""
    replaced = {
        "training.per_device_train_batch_size": rows,
        "training.gradient_accumulation_steps": 16 // rows,
        "model.kernels": kernels,
    }
    name, *settings = result.command
    keys = {*replaced, "checkpointing.mode", "checkpointing.skip_last_layers"}
    others = [setting for setting in settings if setting.partition("=")[0] not in keys]
    changed = [f"{key}={value}" for key, value in replaced.items()]
    recipe = load_recipe(
        name.removeprefix("recipe="),
        [
            *others,
            *changed,
            *CHECKPOINTING[checkpointing],
            "data.eval_split=null",
            "training.eval_steps=null",
        ],
    )
    answer = SharedTraces(on_gpus(recipe, None)[0], kept=kept).estimate(result.gpu)
    return 0.0 if isinstance(answer, CannotRun) or not answer.fits else answer.step.tokens_per_second


def test_lora_is_faster_than_full_fine_tuning_where_both_have_room(wide, kept):
    """LoRA recomputed half of its layers beside 41 GiB that were free, one row at a time."""
    lora, full = (chosen(wide, method, ["h100-80gb"], kept)["h100-80gb"] for method in ("lora", "full"))
    assert lora.estimate.step.tokens == full.estimate.step.tokens
    assert lora.estimate.step.tokens_per_second > full.estimate.step.tokens_per_second


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "qlora"])
@pytest.mark.parametrize(
    "gpu, settings", [("b200", ()), ("rtx-4090", ()), ("rtx-4090", (BUDGET,)), ("rtx-3090", (BUDGET,))]
)
def test_the_choice_is_within_a_tenth_of_the_best_of_a_grid(wide, kept, method, gpu, settings):
    result = chosen(wide, method, [gpu], kept, *settings)[gpu]
    assert result.fits
    kernels = {
        "none",
        *(word.partition("=")[2] for word in result.command if word.startswith("model.kernels=")),
    }
    best = max(
        by_hand(result, *each, kept) for each in itertools.product((1, 2, 4, 8), CHECKPOINTING, kernels)
    )
    assert best <= 1.1 * result.estimate.step.tokens_per_second
