"""``checkpointing.mode=auto``: the layers are chosen before a run, once, and the run is that with what was chosen."""

from __future__ import annotations

import json
import logging
import shutil

import pytest
from stock_scripts import ProcessHere

import lowmem_ft
from lowmem_ft import estimate_memory, load_recipe
from lowmem_ft.foundation.errors import DoesNotFitError
from lowmem_ft.foundation.memory.uncertainty import with_headroom
from lowmem_ft.foundation.user_paths import KEPT_FOLDER_VARIABLE
from lowmem_ft.planning.estimator.traces.trace_cache import KeptTraces
from lowmem_ft.planning.preflight import background_estimate, plan_first

SHORT = (
    "training.max_steps=4",
    "training.save_steps=2",
    "training.eval_steps=null",
    "budget.preflight=false",
)
LAST_LAYER_ALONE = ("checkpointing.mode=full", "checkpointing.skip_last_layers=1")


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """A folder of kept traces: each test asks for the same three estimates."""
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(autouse=True)
def _traces_are_kept(traces, monkeypatch):
    monkeypatch.setenv(KEPT_FOLDER_VARIABLE, str(traces))


@pytest.fixture
def tiny(tmp_path):
    def load(run, *settings):
        always = (f"training.output_dir={tmp_path / run}", "training.use_cpu=true", *SHORT)
        large = ("training.per_device_train_batch_size=64", "training.gradient_accumulation_steps=1")
        return load_recipe("tiny", [*always, *large, *settings])

    return load


@pytest.fixture
def chosen_here(monkeypatch):
    """The search that a run starts in another process, in this one; what was asked."""
    asked = []

    class Here(ProcessHere):
        def call(self, function, *arguments, **callbacks):
            asked.append(function.__name__)
            return super().call(function, *arguments, **callbacks)

    monkeypatch.setattr(plan_first, "EstimatingProcess", Here)
    return asked


@pytest.fixture
def just_enough(tiny):
    """A budget that what is chosen just fits; nobody holds this process, which has run other tests, to it."""

    def settings(*choice, share=1.0):
        estimate = estimate_memory(tiny("any", *choice), "cpu", kept=KeptTraces.of_user())
        size = max(with_headroom(estimate.process_peak_bytes), estimate.process_high_bytes)
        return f"budget.device={round(share * size) + 1}B", "budget.enforce=false", "checkpointing.mode=auto"

    return settings


def outcome(result):
    """Each loss and the weights at the end."""
    records = [json.loads(line) for line in (result.output_dir / "metrics.jsonl").read_text().splitlines()]
    weights = (result.model_folder / "model.safetensors").read_bytes()
    return [record["loss"] for record in records if "loss" in record], weights


def test_a_run_is_the_one_with_what_was_chosen_and_goes_on_with_it(
    tiny, tmp_path, chosen_here, just_enough, caplog
):
    with caplog.at_level(logging.INFO):
        chosen = lowmem_ft.train(tiny("chosen", *just_enough(*LAST_LAYER_ALONE)))
    assert "checkpointing.mode=auto: full, skip_last_layers=1 (fits with" in caplog.text
    assert "1 of 2 layers recompute their activations" in caplog.text
    saved = load_recipe(str(tmp_path / "chosen" / "recipe.yaml")).checkpointing
    assert (saved.mode, saved.skip_last_layers) == ("full", 1)
    by_hand = outcome(lowmem_ft.train(tiny("by_hand", *LAST_LAYER_ALONE)))
    assert outcome(chosen) == by_hand

    shutil.rmtree(tmp_path / "chosen" / "checkpoint-4")
    caplog.clear()
    auto = ("checkpointing.mode=auto", "budget.device=8GiB", "budget.enforce=false")
    with caplog.at_level(logging.INFO):
        resumed = lowmem_ft.train(tiny("chosen", *auto, "training.resume_from_checkpoint=auto"))
    assert "Resuming with the memory settings that the run was planned with." in caplog.text
    assert "1 of 2 layers recompute their activations" in caplog.text
    assert chosen_here == ["plan_checkpointing"], "once, whatever the budget is later"
    assert outcome(resumed) == by_hand


def test_with_enough_memory_no_layer_is_checkpointed(tiny, chosen_here, just_enough):
    recipe, _ = plan_first.with_plan(tiny("run", *just_enough("checkpointing.mode=none")))
    assert recipe.checkpointing.mode == "none"
    assert recipe.undecided_keys == ()


def test_where_no_choice_fits_nothing_is_trained(tiny, tmp_path, chosen_here, just_enough):
    settings = just_enough("checkpointing.mode=full", share=0.9)
    with pytest.raises(DoesNotFitError) as refused:
        lowmem_ft.train(tiny("run", *settings))
    assert (
        "No choice of checkpointed layers makes it fit with 6% to spare: the nearest, checkpointing.mode=full, lack"
        in str(refused.value)
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("packing", [True, False])
def test_what_was_estimated_to_choose_is_not_estimated_again(
    tiny, chosen_here, just_enough, monkeypatch, caplog, packing
):
    """Where rows turn out shorter than the recipe allows, the run's own estimate is another."""
    started = []
    monkeypatch.setattr(background_estimate, "EstimatingProcess", lambda: started.append(True) or NoAnswer())
    settings = ("budget.preflight=true", f"data.packing={packing}", "training.max_steps=1")
    with caplog.at_level(logging.INFO):
        lowmem_ft.train(tiny("run", *just_enough("checkpointing.mode=full", share=1.5), *settings))
    assert bool(started) == (not packing)
    assert caplog.text.count("Estimating the run's memory.") == (not packing)
    assert ("Estimated: " in caplog.text) == packing


class NoAnswer:
    """Another process that says nothing."""

    def call(self, *_) -> None:
        return None

    def close(self) -> None:
        pass
