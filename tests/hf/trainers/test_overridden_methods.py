"""What people override of a trainer, and what their callbacks do: as without ``hf.attach``, or refused by name."""

from __future__ import annotations

import inspect

import pytest
import torch
from attached_trainers import attached_trainer, problems_of, trainer_of, weights_of
from transformers import Trainer, TrainerCallback

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.hf.trainers.overridden_methods import (
    FOLLOWED,
    FOLLOWED_MOMENTS,
    REFUSED,
    REFUSED_MOMENTS,
    UNREACHED,
)
from lowmem_ft.hf.trainers.trainer_kinds import KINDS

IN_BACKWARD = ("accumulation.order=vertical", "checkpointing.mode=full", "optimizer.in_backward=true")


def methods_of(kind):
    """Those that its own file defines."""
    return {
        name
        for name, value in vars(kind).items()
        if (callable(value) or isinstance(value, (staticmethod, classmethod)))
        and name not in inspect.__dict__
        if name == "__init__" or not name.startswith("__")
    }


def upstream_classes():
    import trl

    named = [Trainer, *(getattr(trl, name) for name in KINDS if name != "Trainer")]
    return {one for kind in named for one in kind.__mro__ if one is not object}


def test_every_method_upstream_has_is_followed_or_refused():
    """A new version that adds one fails here: somebody has to read what it does."""
    theirs = set().union(*map(methods_of, upstream_classes()))
    assert len(theirs) > 100
    lists = [REFUSED.keys(), FOLLOWED, UNREACHED]
    assert theirs - set().union(*lists) == set()
    assert set().union(*lists) - theirs == set()
    assert sum(map(len, lists)) == len(set().union(*lists))


def test_so_is_every_moment_of_a_callback():
    theirs = {name for name in vars(TrainerCallback) if name.startswith("on_")}
    assert theirs == REFUSED_MOMENTS.keys() | FOLLOWED_MOMENTS
    assert not REFUSED_MOMENTS.keys() & FOLLOWED_MOMENTS


def subclass(name):
    def method(self, *args, **kwargs):
        return getattr(Trainer, name)(self, *args, **kwargs)

    return type("Theirs", (Trainer,), {name: method})


ALWAYS = [name for name, (applies, _) in REFUSED.items() if applies.__name__ == "_always"]
IN_FIELDS = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}


@pytest.mark.parametrize("name", ALWAYS)
def test_an_optimizer_or_a_loop_of_ones_own_is_refused(name, tmp_path):
    trainer, _ = trainer_of(tmp_path, kind=subclass(name))
    (problem,) = problems_of(trainer)
    assert problem.startswith(f"Theirs.{name} ")
    assert problem.endswith(".")


@pytest.mark.parametrize("name", ["training_step", "_get_grad_norm"])
def test_gradients_that_are_spent_in_backward_are_nobodys_to_change(name, tmp_path):
    trainer, _ = trainer_of(tmp_path, kind=subclass(name), fields=IN_FIELDS)
    (problem,) = problems_of(trainer, *IN_BACKWARD)
    assert problem.startswith(f"Theirs.{name} may change or read gradients, which optimizer.in_backward=true")
    alone, _ = trainer_of(tmp_path, fields=IN_FIELDS)
    setattr(alone, name, getattr(alone, name))  # put on the object, which many do
    assert f"Trainer.{name} may change" in problems_of(alone, *IN_BACKWARD)[0]


def test_a_method_that_is_put_into_the_class_is_seen(tmp_path, monkeypatch):
    def training_step(self, *args, **kwargs):
        raise AssertionError

    monkeypatch.setattr(Trainer, "training_step", training_step)
    trainer, _ = trainer_of(tmp_path, fields=IN_FIELDS)
    assert "Trainer.training_step may change" in problems_of(trainer, *IN_BACKWARD)[0]


class ZeroesGradients(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        zero_gradients(model)


class StepZeroes(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        zero_gradients(model)
        return loss


def zero_gradients(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


@pytest.mark.parametrize(
    "settings", [(), IN_BACKWARD[:2], ("offload.optimizer=host", "optimizer.state=bf16")], ids=str
)
@pytest.mark.parametrize("who", ["callback", "training_step"])
def test_gradients_that_are_changed_before_the_step_are_what_it_takes(settings, who, tmp_path):
    kind = StepZeroes if who == "training_step" else Trainer
    trainer, _, _ = attached_trainer(tmp_path, *settings, dtype=torch.bfloat16, kind=kind)
    if who == "callback":
        trainer.add_callback(ZeroesGradients())
    before = weights_of(trainer.model)
    trainer.train()
    assert all(weight.equal(before[name]) for name, weight in weights_of(trainer.model).items())


def test_a_callback_that_changes_gradients_is_refused_with_updates_in_backward(tmp_path):
    trainer, _ = trainer_of(tmp_path, fields=IN_FIELDS)
    trainer.add_callback(ZeroesGradients)
    (problem,) = problems_of(trainer, *IN_BACKWARD)
    assert problem.startswith("ZeroesGradients.on_pre_optimizer_step may change")
    later, _, handle = attached_trainer(tmp_path, *IN_BACKWARD)
    for callback in (ZeroesGradients, ZeroesGradients()):
        with pytest.raises(UserError, match=r"ZeroesGradients\.on_pre_optimizer_step"):
            later.add_callback(callback)
    handle.remove()
    later.add_callback(ZeroesGradients())


class AsksForLogits(Trainer):
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        with torch.no_grad():
            outputs = model(**inputs)
        assert outputs.logits is not None
        return outputs.loss, None, None


def test_an_evaluation_of_ones_own_has_its_logits(tmp_path):
    trainer, meter, _ = attached_trainer(tmp_path, kind=AsksForLogits, fields={"max_steps": 1})
    trainer.train()
    alone, stock = trainer_of(tmp_path, fields={"max_steps": 1})
    alone.train()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(alone.evaluate()["eval_loss"], abs=2e-5)
    assert meter.losses == pytest.approx(stock.losses, abs=2e-5)


WEIGHT = "model.layers.0.mlp.up_proj.weight"


class ZeroesAWeight(TrainerCallback):
    """Once, behind the first step: what comes after are small steps from there."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 1:
            model.get_parameter(WEIGHT).data.zero_()  # torch keeps no count of this


@pytest.mark.parametrize("master", ["fp32", "split16", "split24"])
@pytest.mark.parametrize("settings", [(), IN_BACKWARD, ("offload.optimizer=host",)], ids=str)
def test_a_weight_that_a_callback_writes_stays_written(master, settings, tmp_path):
    """Its master follows: it must not bring the old value back, nor make no number of a 0 and old lower bits."""
    trainer, _, _ = attached_trainer(
        tmp_path,
        f"optimizer.master={master}",
        *settings,
        dtype=torch.bfloat16,
        fields={"learning_rate": 1e-5},
    )
    assert trainer.model.get_parameter(WEIGHT).abs().max() > 1e-2
    trainer.add_callback(ZeroesAWeight())
    trainer.train()
    assert trainer.model.get_parameter(WEIGHT).abs().max() <= 3 * 1.1e-5  # three steps of the learning rate
