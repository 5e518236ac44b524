"""NaN and infinity: whose fault it is said to be, what is left whole, and the end of a run that is not well."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from poisoned_steps import poison_the_loss
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lowmem_ft.data.batches.position import DataPosition
from lowmem_ft.foundation.errors import ModelError, UserError
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.techniques.adapters.trained_adapter import Lora
from lowmem_ft.training.export.merging import merge_into_base
from lowmem_ft.training.folder.checkpoint_folders import Progress
from lowmem_ft.training.folder.run_folder import RunFolder
from lowmem_ft.training.run import loop
from lowmem_ft.training.run.health import RunHealth
from lowmem_ft.training.run.loop import train
from lowmem_ft.training.runtimes.accelerate_runtime import launched_runtime

RUINOUS = ("training.learning_rate=1e30", "training.lr_scheduler_type=constant", "optimizer.weight_decay=0")
NO_EVALUATION = ("data.eval_size=null", "training.eval_steps=null")


def after_each_step(monkeypatch, change):
    """Change weights as a step would that went wrong."""
    step = loop.Retries.train_step

    def changing(retries, window):
        result = step(retries, window)
        with torch.no_grad():
            change(retries.session)
        return result

    monkeypatch.setattr(loop.Retries, "train_step", changing)


@pytest.fixture
def trained(tiny, tmp_path):
    """A finished model to start from."""
    return train(
        tiny("training.max_steps=1", "training.save_steps=null", output_dir=tmp_path / "base")
    ).model_folder


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_value_that_is_not_finite_is_found_in_its_file(tiny, trained, value, dtype):
    file = trained / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=rf"model\.layers\.1\.mlp\.up_proj\.weight in {file} holds NaN or infinity"
    ):
        train(tiny(f"model={trained}", "model.weights=pretrained", f"model.dtype={dtype}"))


def test_values_that_are_too_large_for_their_type_are_not_blamed_on_a_step(tiny, tmp_path):
    """No step was taken, and reading has found the checkpoint finite. float16 itself needs a GPU."""
    recipe = dataclasses.replace(tiny(), model=ModelConfig(dtype="float16"))
    runtime = launched_runtime(recipe.training, tmp_path)
    health = RunHealth(recipe, RunFolder.open(recipe), Progress(position=DataPosition(seed=0)), runtime.ranks)
    problems = health.problems_at_the_end(["model.norm.weight"], None)
    assert "model.norm.weight. The values are beyond the largest of model.dtype=float16" in " ".join(problems)


def test_a_learning_rate_that_ruins_the_weights_is_named_with_the_step_and_the_last_whole_checkpoint(
    tiny, tmp_path
):
    run = tmp_path / "run"
    steps = ("training.save_steps=1", "training.save_total_limit=2", *NO_EVALUATION)
    train(tiny("training.max_steps=2", *steps, output_dir=run))
    longer = ("training.max_steps=9", "training.max_skipped_steps=2", "training.resume_from_checkpoint=auto")
    with pytest.raises(UserError) as raised:
        train(tiny(*longer, *steps, *RUINOUS, output_dir=run))
    message = str(raised.value)
    assert "step 3, the last that did (learning rate 1e+30), may have ruined them all" in message
    assert f"The last checkpoint with finite weights is {run / 'checkpoint-2'}." in message
    assert (run / "checkpoint-2").is_dir()  # though save_total_limit=2 and later ones have been written
    aside = {folder.name for folder in run.glob("*.suspect")}
    assert aside == {"checkpoint-3.suspect", "checkpoint-4.suspect"}
    train(
        tiny("training.max_steps=3", *longer[1:], *steps, output_dir=run)
    )  # from checkpoint-2, and at its own rate
    assert (run / "checkpoint-3").is_dir()
    train(tiny("training.max_steps=1", "training.overwrite_output_dir=true", *steps, output_dir=run))
    assert [folder.name for folder in run.glob("checkpoint-*")] == ["checkpoint-1"]


def test_a_ruined_checkpoint_of_a_run_that_was_killed_is_set_aside_by_the_run_that_goes_on(
    tiny, tmp_path, monkeypatch
):
    """The weights of step 3 are finite, and nothing that comes out of them is: it was not known when it was saved."""
    run = tmp_path / "run"
    steps = ("training.save_steps=1", "training.save_total_limit=null", *NO_EVALUATION)
    train(tiny("training.max_steps=2", *steps, output_dir=run))
    again = (
        "training.max_steps=9",
        "training.max_skipped_steps=2",
        "training.resume_from_checkpoint=auto",
        *steps,
    )
    with monkeypatch.context() as patch:
        patch.setattr(loop.TrainingRun, "_stop_if_requested", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(tiny(*again, *RUINOUS, output_dir=run))
    assert (run / "checkpoint-3").is_dir()
    with pytest.raises(
        UserError, match=rf"step 3, the last that did, .* finite weights is {run / 'checkpoint-2'}\."
    ):
        train(tiny(*again, output_dir=run))
    assert {folder.name for folder in run.glob("*.suspect")} == {
        "checkpoint-3.suspect",
        "checkpoint-4.suspect",
    }
    train(tiny("training.max_steps=3", *again[1:], output_dir=run))
    assert (run / "checkpoint-3").is_dir()


def test_ruined_weights_are_not_saved(tiny, tmp_path, monkeypatch):
    run, steps = tmp_path / "run", []

    def ruin_the_second(session):
        steps.append(session)
        if len(steps) == 2:
            session.unwrapped_model.model.norm.weight.fill_(math.nan)

    after_each_step(monkeypatch, ruin_the_second)
    settings = ("training.max_steps=4", "training.save_steps=1", *NO_EVALUATION)
    with pytest.raises(
        UserError, match=rf"not finite since step 2 .* finite weights is {run / 'checkpoint-1'}\."
    ):
        train(tiny(*settings, output_dir=run))
    assert [folder.name for folder in run.glob("checkpoint-*")] == ["checkpoint-1"]


def test_a_run_that_ends_with_skipped_steps_fails_and_keeps_its_model(tiny, tmp_path, caplog):
    run = tmp_path / "run"
    caplog.set_level("INFO")
    with pytest.raises(UserError, match=r"do not use .*The last 2 steps were not finite .* since step 1"):
        train(tiny("training.max_steps=3", *NO_EVALUATION, *RUINOUS, output_dir=run))
    AutoModelForCausalLM.from_pretrained(run / "model")
    assert "from_pretrained loads it" not in caplog.text  # above an error that says not to
    assert "1 process: steps 1 to 3" in caplog.text


def test_a_held_out_loss_that_is_not_finite_fails_the_run(tiny, tmp_path, monkeypatch):
    after_each_step(monkeypatch, lambda session: session.unwrapped_model.model.norm.weight.fill_(3e38))
    with pytest.raises(
        UserError, match=r"do not use .*The held-out loss is (nan|inf)\. There is no earlier checkpoint"
    ):
        train(tiny("training.max_steps=1", output_dir=tmp_path / "run"))


def test_a_bad_example_in_the_middle_does_not(tiny, metrics, tmp_path, monkeypatch):
    poison_the_loss(monkeypatch, {2})
    assert train(tiny("training.max_steps=3", output_dir=tmp_path / "run")).steps == 3
    assert metrics(tmp_path / "run", "skipped_steps") == [0, 1, 1]


def test_one_bad_step_at_the_end_is_told(tiny, tmp_path, monkeypatch):
    poison_the_loss(monkeypatch, {3})
    with pytest.raises(UserError, match=r"The last step was not finite and changed no weight since step 2"):
        train(tiny("training.max_steps=3", "training.save_steps=1", output_dir=tmp_path / "run"))
    assert (tmp_path / "run" / "checkpoint-2").is_dir()  # the held-out loss shows that its weights are good


def test_ruined_weights_end_a_run_at_once_and_name_themselves(tiny, tmp_path, monkeypatch):
    after_each_step(monkeypatch, lambda session: session.unwrapped_model.model.norm.weight.fill_(math.inf))
    with pytest.raises(
        UserError, match=r"not finite since step 1 \(learning rate 0\.\d+\): model\.norm\.weight"
    ):
        train(tiny("training.lr_scheduler_type=constant", *NO_EVALUATION, output_dir=tmp_path / "run"))


def test_an_adapter_that_is_not_finite_is_saved_told_and_not_merged(tiny, trained, tmp_path, monkeypatch):
    after_each_step(
        monkeypatch,
        lambda session: next(iter(session.techniques.find(Lora).parameters().values()))[0].fill_(math.nan),
    )
    run = tmp_path / "run"
    settings = (f"model={trained}", "model.weights=pretrained", "adapter.name=lora", "training.max_steps=1")
    with pytest.raises(UserError, match=r"do not use .*Weights are not finite since step 1.*lora_A"):
        train(tiny(*settings, *NO_EVALUATION, output_dir=run))
    assert json.loads((run / "model" / "adapter_config.json").read_text())["peft_type"] == "LORA"
    with pytest.raises(UserError, match=r"An adapter's weights must be finite.*lora_A"):
        merge_into_base(run / "model", tmp_path / "merged")
