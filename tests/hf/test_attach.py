"""A recipe inside transformers' Trainer: its losses, its bytes, its checkpoints."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from attached_trainers import (
    SAME_LOSSES,
    SAME_NORMS,
    VERTICAL,
    attached_trainer,
    measure_kept_bytes,
    recipe_of,
    trainer_of,
    weights_of,
)
from stock_scripts import CHECKPOINTING
from tiny_models import tiny_llama
from transformers import TrainerCallback, set_seed

from lowmem_ft import hf
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker

ON_THE_HOST = (
    *VERTICAL,
    "offload.optimizer=host",
    "offload.parameters=stream",
    "optimizer.in_backward=true",
    "offload.activations=inputs",
)
LADDER = (*ON_THE_HOST, "tiling.mlp=2", "tiling.head=3", "loss.chunk_tokens=32")
LORA = ("adapter.name=lora", "adapter.r=4", "checkpointing.mode=full")
BF16 = {"bf16": True}

EXACT = {
    "own loss": ("loss.chunk_tokens=null",),
    "chunked loss": ("loss.chunk_tokens=32", "tiling.head=3"),
    "checkpointing and tiles": ("checkpointing.mode=full", "tiling.mlp=2"),
    "activations on the host": ("checkpointing.mode=full", "offload.activations=inputs"),
    "state on the host": ("offload.optimizer=host",),
    "vertical": VERTICAL,
    "the ladder": LADDER,
}


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    trainer, meter = trainer_of(tmp_path_factory.mktemp("stock"))
    trainer.train()
    return meter


@pytest.mark.parametrize("name", EXACT)
def test_exact_techniques_have_the_stock_trainers_losses(name, stock, tmp_path):
    trainer, meter, _ = attached_trainer(tmp_path, *EXACT[name])
    trainer.train()
    assert meter.losses == pytest.approx(stock.losses, abs=SAME_LOSSES)
    assert meter.norms == pytest.approx(stock.norms, rel=SAME_NORMS)


@pytest.mark.parametrize("settings", [(), ("offload.parameters=stream",)])
def test_adapters_have_the_losses_of_peft_alone(settings, tmp_path):
    wanted = recipe_of(*LORA)
    alone, expected = trainer_of(tmp_path / "alone", model=hf.prepare_model(tiny_llama(), wanted))
    alone.train()
    trainer, meter, _ = attached_trainer(tmp_path / "ours", *LORA, *settings)
    trainer.train()
    assert meter.losses == pytest.approx(expected.losses, abs=SAME_LOSSES)


def test_rounded_state_drifts_and_is_our_optimizers(stock, tmp_path):
    trainer, meter, handle = attached_trainer(tmp_path, "optimizer.state=8bit")
    trainer.train()
    assert "optimizer.state=8bit" in handle.applied
    shown = repr(handle)
    assert shown.startswith(f"<{handle.recipe.name}: ")
    assert "optimizer.state=8bit" in shown
    handle.remove()
    assert repr(handle).startswith(f"<{handle.recipe.name}, removed: ")
    assert meter.losses[:2] == pytest.approx(stock.losses[:2], abs=1e-4)
    assert meter.losses != pytest.approx(stock.losses, abs=SAME_LOSSES)


class KeepsWeights(TrainerCallback):
    """Those that somebody's callback reads at the end of each step."""

    def __init__(self):
        self.seen = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.seen.append(weights_of(model))


def test_callbacks_read_the_weights_of_their_step(tmp_path):
    """Here updates are made in the step; our own loop makes those of layers beside the next forward pass."""
    expected, seen = KeepsWeights(), KeepsWeights()
    settings = (*VERTICAL, "optimizer.in_backward=true")
    for callback, added in ((expected, ()), (seen, ("offload.optimizer=host",))):
        trainer, _, _ = attached_trainer(tmp_path, *settings, *added, fields={"max_steps": 2})
        trainer.add_callback(callback)
        trainer.train()
    for here, there in zip(seen.seen, expected.seen, strict=True):
        assert all(here[name].equal(weight) for name, weight in there.items())


ONE_STEP = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_steps": 1}


def kept_by(trainer, meter):
    measure_kept_bytes(trainer, meter)
    with StorageTracker() as meter.tracker:
        trainer.train()
    (kept,) = meter.kept
    return kept


@pytest.fixture(scope="module")
def stock_bytes(tmp_path_factory):
    return kept_by(*trainer_of(tmp_path_factory.mktemp("stock"), fields=ONE_STEP))


@pytest.mark.parametrize(
    "settings, least",
    [(("loss.chunk_tokens=32",), 0.96), (("checkpointing.mode=full",), 0.6), (LADDER, 0.5)],
)
def test_less_is_kept_for_backward(settings, least, stock_bytes, tmp_path):
    """Of what the stock trainer keeps of eight rows, at most this share."""
    trainer, meter, _ = attached_trainer(tmp_path / "ours", *settings, fields=ONE_STEP)
    assert kept_by(trainer, meter) <= least * stock_bytes


def metrics_of_logits():
    """What wants logits in an evaluation."""
    return {
        "compute_metrics": lambda p: {"right": float((p.predictions[:, :-1] == p.label_ids[:, 1:]).mean())},
        "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
    }


RESUMED = {
    "the ladder": ((*LADDER, "optimizer.state=8bit"), torch.float32, {}),
    "the ladder in bfloat16": ((*LADDER, "optimizer.master=split24"), torch.bfloat16, {}),
    "adapters": (LORA, torch.float32, {}),
    "streamed adapters": ((*LORA, "offload.parameters=stream"), torch.float32, {}),
    "autocast": (("checkpointing.mode=full",), torch.float32, BF16),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in ("the ladder", "adapters") else [])
        for name in RESUMED
    ],
)
def test_a_run_goes_on_bit_for_bit(name, tmp_path):
    """From a checkpoint at half, with evaluations that want logits in between."""
    settings, dtype, fields = RESUMED[name]
    every_step = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    fields = {**fields, **every_step, "max_steps": 2}

    def run(**how):
        trainer, meter, handle = attached_trainer(
            tmp_path, *settings, dtype=dtype, fields=fields, **metrics_of_logits()
        )
        trainer.train(**how)
        handle.remove()
        return meter, weights_of(trainer.model)

    whole, weights = run()
    rest, again = run(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert rest.losses == whole.losses[1:]
    assert rest.norms == whole.norms[1:]
    scores = [(logs["eval_loss"], logs["eval_right"]) for logs in whole.evaluations]
    assert [(logs["eval_loss"], logs["eval_right"]) for logs in rest.evaluations] == scores[1:]
    assert all(torch.equal(weights[key], again[key]) for key in weights)


def test_the_best_model_is_loaded_where_the_weights_are(tmp_path):
    """By a metric by which it is not the last."""
    fields = {
        "save_strategy": "steps",
        "save_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,
    }
    trainer, meter, handle = attached_trainer(tmp_path, *ON_THE_HOST, fields=fields)
    trainer.train()
    best = max(logs["eval_loss"] for logs in meter.evaluations)
    assert best > meter.evaluations[-1]["eval_loss"] + 0.1
    assert trainer.evaluate()["eval_loss"] == pytest.approx(best, abs=SAME_LOSSES)
    handle.remove()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(best, abs=SAME_LOSSES)


def test_removing_leaves_the_stock_trainer(tmp_path):
    """Under autocast, which Accelerate puts around what is attached."""
    fields = {**BF16, CHECKPOINTING: True, "max_steps": 2}

    def state_of(trainer):
        """What an attachment could have left, but for how often a trainer has trained."""
        things = (trainer, trainer.accelerator, trainer.model)
        names = [sorted(vars(thing)) for thing in things]
        return names, [vars(trainer)[name] for name in ("optimizer", "model_wrapped")]

    trainer, _ = trainer_of(tmp_path, fields=fields)
    before, layers = state_of(trainer), [vars(layer).keys() for layer in trainer.model.model.layers]
    weights = weights_of(trainer.model)
    handle = hf.attach(trainer, recipe_of("tiling.mlp=2", "checkpointing.mode=full"))
    assert not getattr(trainer.args, CHECKPOINTING)
    handle.remove()
    assert getattr(trainer.args, CHECKPOINTING)
    assert state_of(trainer) == before
    assert [vars(layer).keys() for layer in trainer.model.model.layers] == layers

    handle = hf.attach(trainer, recipe_of())
    trainer.train()
    handle.remove()
    assert vars(trainer.model).keys() == tiny_llama().__dict__.keys()
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            parameter.copy_(weights[name])
    expected, _ = trainer_of(tmp_path / "stock", fields=fields)
    losses = []
    for one in (trainer, expected):
        set_seed(0)  # rows are drawn by it
        losses.append(one.train().training_loss)
    assert losses[0] == losses[1]


def test_accelerates_autocast_goes_without_its_cache_and_comes_off_a_peft_model(tmp_path):
    """A cache would hold a 16-bit copy of every weight while a pass lasts."""
    fields = {**BF16, "max_steps": 1}
    trainer, _, handle = attached_trainer(tmp_path, *LORA, fields=fields)
    seen = []
    layer = trainer.model.get_base_model().model.layers[0]
    hook = layer.register_forward_hook(
        lambda *_: seen.append((torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()))
    )
    trainer.train()
    assert set(seen) == {(True, False)}
    hook.remove()
    handle.remove()
    assert "forward" not in vars(trainer.model)


def test_it_says_what_is_on_and_what_of_the_recipe_is_not_read(tmp_path, caplog):
    """What the trainer does as the recipe has it, logging in each step, is not among that."""
    trainer, _ = trainer_of(tmp_path)
    own = ("data.path=mine.jsonl", "training.num_train_epochs=5", "training.logging_steps=1", "tiling.mlp=2")
    with caplog.at_level(logging.INFO, "lowmem_ft.hf"):
        handle = hf.attach(trainer, recipe_of(*own))
    lines = [record.message for record in caplog.records if record.name.startswith("lowmem_ft.hf")]
    assert lines[0].splitlines()[1:] == [
        "  training.num_train_epochs: the trainer's num_train_epochs=3.0, not the recipe's 5.0"
    ]
    assert lines[1] == "Neither the trainer nor hf.attach acts on: data.path=mine.jsonl."
    assert lines[2].startswith(
        "Attached to Trainer: loss.chunk_tokens=1024; tiling.mlp=2; optimizer.name=adamw"
    )
    assert len(lines) == 3
    assert handle.recipe.training.learning_rate == 1e-2


def not_finite(trainer, *, at):
    """Make the loss of some steps infinite on its way to backward."""
    backward, count = trainer.accelerator.backward, iter(range(100))

    def broken(loss, **kwargs):
        backward(loss * (math.inf if next(count) // 2 in at else 1), **kwargs)

    trainer.accelerator.backward = broken


def test_a_step_that_is_not_finite_changes_nothing(tmp_path):
    """Neither weights nor state nor schedule; the next steps do as if it had not been."""
    fields = {"lr_scheduler_type": "linear", "max_steps": 3, "eval_strategy": "steps", "eval_steps": 1}
    model = tiny_llama()
    trainer, meter = trainer_of(tmp_path, model=model, fields=fields)
    not_finite(trainer, at={0})
    hf.attach(trainer, recipe_of())
    before = weights_of(model)
    seen = []
    trainer.add_callback(
        type("Seen", (type(meter),), {"on_step_end": lambda *_, **__: seen.append(weights_of(model))})
    )
    trainer.train()
    assert all(torch.equal(before[name], seen[0][name]) for name in before)
    assert not all(torch.equal(before[name], seen[1][name]) for name in before)
    rates = [logs["learning_rate"] for logs in meter.logs if "learning_rate" in logs]
    assert rates[0] == rates[1] == 1e-2
    assert all(math.isfinite(logs["eval_loss"]) for logs in meter.evaluations)


def test_too_many_of_them_end_the_run(tmp_path):
    trainer, _ = trainer_of(tmp_path)
    not_finite(trainer, at={0, 1, 2, 3})
    hf.attach(trainer, recipe_of("training.max_skipped_steps=3"))
    with pytest.raises(UserError, match=r"not finite for 3 steps in a row \(training.max_skipped_steps\)"):
        trainer.train()
    assert trainer.state.global_step == 2


def test_those_in_a_row_are_counted_from_the_last_good_one(tmp_path):
    """Three of five are skipped, and never three in a row."""
    trainer, meter = trainer_of(tmp_path, fields={"max_steps": 5})
    not_finite(trainer, at={0, 1, 3})
    hf.attach(trainer, recipe_of("training.max_skipped_steps=3"))
    trainer.train()
    assert [math.isfinite(norm) for norm in meter.norms] == [False, False, True, False, True]


def test_a_loss_scale_that_is_too_high_skips_and_falls(tmp_path, stock):
    """fp16's scaler on a CPU in float32: its arithmetic is exact, its overflow is not."""
    trainer, meter = trainer_of(tmp_path)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    trainer.accelerator.scaler.set_backoff_factor(2.0**-120)
    hf.attach(trainer, recipe_of("training.max_skipped_steps=1"))
    trainer.train()
    assert trainer.accelerator.scaler.get_scale() == 2.0**7
    # The first batch is lost; the others of stock come a step later, from the same weights.
    assert not math.isfinite(meter.norms[0])
    assert all(map(math.isfinite, meter.norms[1:]))
