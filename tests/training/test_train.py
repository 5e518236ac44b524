"""What a run leaves behind, and what it says when it cannot go on."""

from __future__ import annotations

import json
import math
import resource
import shutil
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from poisoned_steps import poison_the_loss
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowmem_ft.foundation import packages
from lowmem_ft.foundation.errors import CheckpointError, MissingPackageError, UserError
from lowmem_ft.recipe import load_recipe
from lowmem_ft.training.run import loop
from lowmem_ft.training.run.loop import train
from lowmem_ft.training.step.schedule import _num_warmup_steps

SHORT = ("training.max_steps=4", "training.save_steps=2", "training.eval_steps=2")


def test_the_saved_model_is_a_plain_huggingface_model_that_has_learnt(tiny, metrics, tmp_path):
    result = train(tiny(output_dir=tmp_path / "run"))
    losses = metrics(tmp_path / "run")
    assert losses[-1] < losses[0] - 1
    assert result.evaluation is not None
    assert result.evaluation.loss < losses[0] - 1
    model = AutoModelForCausalLM.from_pretrained(result.model_folder)
    tokenizer = AutoTokenizer.from_pretrained(result.model_folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert answer.shape[1] > prompt["input_ids"].shape[1]
    assert model.config.use_cache


def test_the_held_out_loss_is_the_saved_models(tiny, tmp_path):
    """Evaluation through the chunked loss equals the plain loss of the reloaded model."""
    recipe = tiny(*SHORT, output_dir=tmp_path / "run")
    result = train(recipe)
    model = AutoModelForCausalLM.from_pretrained(result.model_folder)
    run = loop.TrainingRun.build(
        load_recipe(
            "tiny",
            [f"training.output_dir={tmp_path / 'again'}", "training.use_cpu=true", "loss.chunk_tokens=null"],
        )
    )
    loss_sum, count = 0.0, 0
    for index in range(run.data.evaluation.num_rows):
        batch = run.data.collate([run.data.evaluation.read(index)])
        with torch.no_grad():
            loss = model(input_ids=batch.input_ids_BT, labels=batch.labels_BT).loss
        loss_sum, count = loss_sum + float(loss) * batch.num_label_tokens, count + batch.num_label_tokens
    assert count == result.evaluation.num_label_tokens
    assert result.evaluation.loss == pytest.approx(loss_sum / count, rel=1e-5)


def test_metrics_say_what_every_step_did(tiny, tmp_path):
    train(tiny(*SHORT, "training.eval_on_start=true", output_dir=tmp_path / "run"))
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    for record in steps:
        assert record["tokens_per_second"] > 0
        assert 0 < record["memory_now_bytes"] <= record["memory_peak_bytes"]
        assert record["grad_norm"] > 0
        assert record["skipped_steps"] == 0
    assert [record["step"] for record in records if "eval_loss" in record] == [0, 2, 4]
    assert all(
        record["eval_perplexity"] == math.exp(record["eval_loss"])
        for record in records
        if "eval_loss" in record
    )


@pytest.mark.filterwarnings("error")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_run_raises_no_warning_of_a_library_and_its_folder_says_how_to_do_it_again(tiny, tmp_path):
    recipe = tiny(*SHORT, output_dir=tmp_path / "run")
    train(recipe)
    assert load_recipe(str(tmp_path / "run" / "recipe.yaml")) == recipe
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "held-out loss" in card
    assert "learning_rate: 0.01" in card


def test_training_lengthens_with_epochs_and_max_steps_goes_before_them(tiny, tmp_path):
    # 56 examples, 8 a step
    assert train(tiny("training.num_train_epochs=0.5", output_dir=tmp_path / "half")).steps == 4
    assert train(tiny("training.max_steps=5", output_dir=tmp_path / "five")).steps == 5


@pytest.mark.parametrize("setting,steps", [(0, 0), (0.05, 6), (0.5, 51), (7, 7), (1, 1)])
def test_warmup_is_a_number_of_steps_or_a_share_of_them(setting, steps):
    training = load_recipe("tiny", [f"training.warmup_steps={setting}"]).training
    assert _num_warmup_steps(training, 101) == steps


def test_a_step_that_is_not_finite_is_skipped_counted_and_named(tiny, metrics, tmp_path, monkeypatch, caplog):
    poison_the_loss(monkeypatch, steps={3})
    train(tiny(*SHORT, output_dir=tmp_path / "run"))
    assert metrics(tmp_path / "run", "skipped_steps") == [0, 0, 1, 1]
    assert "Step 3 skipped: loss nan" in caplog.text
    assert "Examples of this step: [" in caplog.text
    assert all(math.isfinite(loss) for index, loss in enumerate(metrics(tmp_path / "run")) if index != 2)


def test_after_too_many_such_steps_in_a_row_the_run_stops(tiny, metrics, tmp_path, monkeypatch):
    poison_the_loss(monkeypatch, steps={2, 3, 5, 6, 7})
    with pytest.raises(
        UserError, match=r"3 steps in a row \(training\.max_skipped_steps\), the last at step 7"
    ):
        train(tiny("training.max_skipped_steps=3", output_dir=tmp_path / "run"))
    assert len(metrics(tmp_path / "run")) == 6


def test_a_full_disk_leaves_the_previous_checkpoint_whole(tiny, tmp_path):
    """A real failing write: the kernel refuses files above a limit, as it does on a full disk."""
    run = tmp_path / "run"
    train(tiny("training.max_steps=2", "training.save_steps=2", "training.eval_steps=null", output_dir=run))
    shutil_free = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, shutil_free[1]))
    try:
        with pytest.raises(CheckpointError, match=r"cannot be written.*Earlier checkpoints are untouched"):
            train(
                tiny(
                    "training.max_steps=4",
                    "training.save_steps=2",
                    "training.eval_steps=null",
                    "training.resume_from_checkpoint=auto",
                    output_dir=run,
                )
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, shutil_free)
    assert sorted(path.name for path in run.glob("checkpoint-*")) == ["checkpoint-2"]
    resumed = tiny(
        "training.max_steps=4",
        "training.eval_steps=null",
        "training.resume_from_checkpoint=auto",
        output_dir=run,
    )
    assert train(resumed).steps == 4


@dataclass
class _AtStep:
    """Does something to the run's folder after a step."""

    step: int
    act: Callable[[], None]

    def on_step(self, event):
        if event.step == self.step:
            self.act()


@pytest.mark.parametrize(
    "save_steps, left", [(1, "The checkpoints are untouched"), (9, "There is no checkpoint yet")]
)
def test_a_disk_that_is_full_of_metrics_is_told_with_what_is_left(tiny, tmp_path, save_steps, left):
    run = tmp_path / "run"

    def fill():
        (run / "metrics.jsonl").unlink()
        (run / "metrics.jsonl").symlink_to("/dev/full")

    recipe = tiny(f"training.save_steps={save_steps}", "training.eval_steps=null", output_dir=run)
    said = rf"metrics.jsonl cannot be written: No space left on device. {left}"
    with pytest.raises(CheckpointError, match=said):
        train(recipe, callbacks=[_AtStep(2, fill)])


def test_a_folder_that_is_deleted_while_the_run_writes_there_is_told(tiny, tmp_path):
    run = tmp_path / "run"
    recipe = tiny("training.save_steps=9", "training.eval_steps=null", output_dir=run)
    with pytest.raises(CheckpointError, match=r"the folder .*run is gone, with what the run had saved"):
        train(recipe, callbacks=[_AtStep(2, lambda: shutil.rmtree(run))])
    assert not run.exists()


def test_a_tracker_gets_the_metrics(tiny, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(
        tiny(
            *SHORT,
            "training.report_to=[tensorboard]",
            "training.logging_steps=1",
            output_dir=tmp_path / "run",
        )
    )
    events = EventAccumulator(str(next((tmp_path / "run" / "logs").glob("*"))))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4]
    assert [event.step for event in events.Scalars("eval_loss")] == [2, 4]


def test_a_tracker_that_is_not_installed_says_how_to_install_it(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(packages, "is_installed", lambda package: package != "wandb")
    with pytest.raises(MissingPackageError, match=r"pip install 'lowmem-ft\[track\]'"):
        train(tiny("training.report_to=[wandb]", output_dir=tmp_path / "run"))


def test_streaming_without_an_end_asks_for_one(tiny, tmp_path):
    with pytest.raises(UserError, match=r"training\.max_steps"):
        train(tiny("data.streaming=true", "data.eval_size=null", output_dir=tmp_path / "run"))


def test_lost_updates_of_bf16_weights_are_measured(tiny, metrics, tmp_path, caplog):
    overrides = ("model.dtype=bfloat16", "optimizer.master=none", "training.learning_rate=1e-7")
    train(tiny(*SHORT, *overrides, "training.logging_steps=1", output_dir=tmp_path / "run"))
    assert min(metrics(tmp_path / "run", "lost_updates")) > 0.5
    assert "lost to rounding in torch.bfloat16" in caplog.text


def test_techniques_are_taken_off_the_finished_model(tiny, tmp_path):
    run = loop.TrainingRun.build(tiny(*SHORT, output_dir=tmp_path / "run"))
    model = run.session.unwrapped_model
    run.train()
    assert "forward" not in vars(model)
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def test_two_runs_in_one_process_each_have_their_own_precision(tiny, metrics, tmp_path):
    precisions = ("bf16", "no", "bf16")
    for index, precision in enumerate(precisions):
        train(tiny(*SHORT, f"training.mixed_precision={precision}", output_dir=tmp_path / str(index)))
    first, other, again = (metrics(tmp_path / str(index)) for index in range(3))
    assert first == again
    assert first != other


def test_every_step_is_in_metrics_however_seldom_it_is_logged(tiny, metrics, tmp_path):
    train(tiny(*SHORT, "training.logging_steps=3", output_dir=tmp_path / "run"))
    assert metrics(tmp_path / "run", "step") == [1, 2, 3, 4]
