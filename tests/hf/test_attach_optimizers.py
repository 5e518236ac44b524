"""Every optimizer that ``TrainingArguments`` can name: attached it trains as the trainer alone would, or is refused."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from attached_trainers import recipe_of, sentence_of, trainer_of, weights_of
from sweeps import few_quick
from tiny_models import tiny_llama
from transformers import Trainer
from transformers.training_args import OptimizerNames

from lowmem_ft import hf
from lowmem_ft.hf.trainers import attaching
from lowmem_ft.optimizers import OPTIMIZERS
from lowmem_ft.recipe.trainers.shared_settings import BY_HF_NAME

TAKEN = [name.value for name in OptimizerNames if name.value in BY_HF_NAME]
STEPS = 3
RATES = {"sgd": 0.5, "lion_8bit": 1e-3, "lion_32bit": 1e-3}
UNLIKE_DEFAULTS = {
    "weight_decay": 0.1,
    "adam_beta1": 0.8,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-6,
}
FIELDS = {
    "sgd": [{}, {"optim_args": "momentum=0.9"}],
    "adafactor": [{"weight_decay": 0.1}],
    **{
        name: [{}, {key: value for key, value in UNLIKE_DEFAULTS.items() if "epsilon" not in key}]
        for name in TAKEN
        if "lion" in name
    },
}
CASES = [(name, fields) for name in TAKEN for fields in FIELDS.get(name, [{}, UNLIKE_DEFAULTS])]
BITSANDBYTES = importlib.util.find_spec("bitsandbytes") is not None


def stock(tmp_path, name, fields):
    """Alike each time: seeded weights, the same rows."""
    torch.manual_seed(1)
    more = {"learning_rate": RATES.get(name, 1e-2), "max_steps": STEPS, **fields}
    return trainer_of(tmp_path, model=tiny_llama(), fields={"optim": name, **more})


def runs_here(name):
    devices = OPTIMIZERS[BY_HF_NAME[name]].devices
    return devices is None or ("cpu" in devices and BITSANDBYTES)


def test_all_names_are_known_to_be_taken_or_not():
    assert set(BY_HF_NAME) <= {name.value for name in OptimizerNames}
    assert len(TAKEN) > 10


RUN_HERE = [case for case in CASES if runs_here(case[0])]
UNLIKE_ALONE = list(dict(RUN_HERE).items())
"""The last of each name, with hyperparameters unlike the defaults; those with the defaults are slow."""


@pytest.mark.parametrize("name, fields", few_quick(RUN_HERE, UNLIKE_ALONE))
def test_it_trains_the_weights_that_the_trainer_alone_trains(name, fields, tmp_path):
    alone, attached = stock(tmp_path, name, fields)[0], stock(tmp_path, name, fields)[0]
    handle = hf.attach(attached, recipe_of(f"optimizer.name={BY_HF_NAME[name]}", "loss.chunk_tokens=null"))
    begin = weights_of(alone.model)
    alone.train()
    attached.train()
    assert handle.recipe.optimizer.name == BY_HF_NAME[name]
    ours = weights_of(attached.model)
    for key, weight in weights_of(alone.model).items():
        moved = (weight - begin[key]).abs().max()
        assert moved > 0, key
        # Sums are in another order; where an average is near 0, or a sign decides, that is a share of a step.
        different = ((ours[key] - weight).abs() > 1e-3 * moved).double().mean()
        assert different < 0.01, (key, different)


@pytest.mark.parametrize("name, fields", CASES)
def test_it_has_the_hyperparameters_that_the_trainer_alone_would_give_it(name, fields, tmp_path):
    """The paged ones, too, which need a GPU to run."""
    trainer, _ = stock(tmp_path, name, fields)
    chosen = attaching.settled_with(
        trainer, recipe_of(f"optimizer.name={BY_HF_NAME[name]}"), "Trainer"
    ).recipe.optimizer
    if not BITSANDBYTES and chosen.row.bitsandbytes is not None:
        pytest.skip("bitsandbytes is not installed")
    _, theirs = Trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    ours = chosen.hyperparameters()
    assert chosen.weight_decay == trainer.args.weight_decay
    for key in ours.keys() | theirs.keys():
        if key in ("betas", "eps", "momentum"):
            assert ours[key] == theirs.get(key, 0.0), key
        elif key in ("optim_bits", "is_paged"):
            form = chosen.row.bitsandbytes
            assert theirs[key] == {"optim_bits": form.bits, "is_paged": form.paged}[key]
        else:  # a new one of theirs would be passed over
            assert (key, theirs[key]) in [
                ("lr", trainer.args.learning_rate),
                ("fused", True),
                ("scale_parameter", False),
                ("relative_step", False),
            ]


@pytest.mark.parametrize("name", [name.value for name in OptimizerNames if name.value not in BY_HF_NAME])
def test_any_other_is_refused(name, tmp_path):
    trainer, _ = trainer_of(tmp_path)
    trainer.args.optim = OptimizerNames(name)
    assert f"TrainingArguments.optim={name} is not the recipe's optimizer.name=adamw" in sentence_of(trainer)


def test_a_recipes_own_momentum_is_used_and_listed(tmp_path):
    trainer, _ = stock(tmp_path, "sgd", {})
    handle = hf.attach(trainer, recipe_of("optimizer.name=sgd", "optimizer.momentum=0.5"))
    assert [str(one) for one in handle.differences] == [
        "optimizer.momentum: the recipe's 0.5, not the trainer's 0.0"
    ]
    assert handle.recipe.optimizer.momentum == 0.5
    made = hf.training_arguments(
        recipe_of("optimizer.name=sgd", "optimizer.momentum=0.5", "training.use_cpu=true")
    )
    assert made.optim_args == "momentum=0.5"


@pytest.mark.parametrize("said", ["momentum=0.9,nesterov=true", "dampening=0.1"])
def test_what_ours_does_not_do_of_an_optimizers_arguments_is_refused(said, tmp_path):
    trainer, _ = stock(tmp_path, "sgd", {"optim_args": said})
    assert "TrainingArguments.optim_args is for an optimizer that the trainer creates" in sentence_of(
        trainer, "optimizer.name=sgd"
    )


def test_another_choice_of_what_decays_is_refused(tmp_path):
    class All(Trainer):
        def get_decay_parameter_names(self, model):
            return [name for name, _ in model.named_parameters()]

    trainer, _ = trainer_of(tmp_path, kind=All, fields={"weight_decay": 0.1})
    assert "get_decay_parameter_names of All chooses otherwise for model.layers.0" in sentence_of(trainer)
    without, _ = trainer_of(tmp_path, kind=All)
    hf.attach(without, recipe_of()).remove()
