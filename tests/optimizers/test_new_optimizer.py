"""An optimizer that nobody has heard of, added as CONTRIBUTING says, does all that ours do: no rule names it."""

from __future__ import annotations

import dataclasses
from typing import Literal

import pytest
import torch
from ground_truth.ladder_run import outcome_of
from measuring.families import FAMILIES
from transformers import AutoConfig

from lowmem_ft.foundation.errors import RecipeError
from lowmem_ft.foundation.knob import Effect
from lowmem_ft.optimizers import ChunkedOptimizer, config, create_optimizer, table
from lowmem_ft.recipe import check_recipe, load_recipe
from lowmem_ft.recipe.reading import keys
from lowmem_ft.recipe.space.remediations import remediations_for


class SignedGradient:
    """The file of its own: each weight moves against the sign of a running average."""

    def averages(self, shape, hyperparameters):
        return {"average": True}

    def step(self, number, hyperparameters):
        def update(weight, chunk):
            average = chunk.averages["average"]
            torch.lerp(chunk.gradient, average, hyperparameters["momentum"], out=average)
            weight.sub_(average.sign(), alpha=hyperparameters["lr"])

        return update


ROW = table.OptimizerRow(
    rule=f"{__name__}:SignedGradient",
    summary="sign of the momentum",
    hyperparameters={"momentum": 0.9},
    averages=("average",),
    effect=Effect(fidelity="other mathematics"),
)

IN_BACKWARD = ["optimizer.in_backward=true", "checkpointing.mode=full", "accumulation.order=vertical"]
LOWER_RUNGS = {
    "host": ["offload.optimizer=host"],
    "in_backward": IN_BACKWARD,
    "streamed": [*IN_BACKWARD, "offload.optimizer=host", "offload.parameters=stream"],
}
FORMATS = {
    "fp32": [],
    "split24": ["model.dtype=bfloat16", "optimizer.master=split24", "optimizer.state=8bit"],
}


@pytest.fixture
def add_optimizer(monkeypatch):
    """Puts a row into the table, with its name, and has recipes read both."""

    def add(name, row):
        monkeypatch.setitem(table.OPTIMIZERS, name, row)
        monkeypatch.setattr(config, "OptimizerName", Literal[tuple(table.OPTIMIZERS)])
        keys.recipe_keys.cache_clear()

    yield add
    monkeypatch.undo()
    keys.recipe_keys.cache_clear()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    AutoConfig.for_model(model_type="llama", **FAMILIES["llama"]).save_pretrained(folder)
    return f"model={folder}"


def recipe_of(model, *settings):
    always = [
        model,
        "data=any",
        "data.max_length=32",
        "data.packing=false",
        "model.weights=random",
        "training.use_cpu=true",
        "training.gradient_accumulation_steps=2",
        "training.max_grad_norm=null",
        "training.lr_scheduler_type=constant",
        "training.learning_rate=1e-3",
    ]
    return load_recipe(None, [*always, *settings])


@pytest.mark.parametrize("kept", FORMATS)
def test_it_trains_the_same_wherever_state_and_weights_are(kept, add_optimizer, model, tmp_path):
    add_optimizer("signed_gradient", ROW)

    def outcome(*settings):
        order = IN_BACKWARD[1:]  # of the sums
        return outcome_of(recipe_of(model, *FORMATS[kept], *order, *settings), tmp_path)

    ours = "optimizer.name=signed_gradient"
    plain = outcome(ours)
    assert plain.losses != outcome("optimizer.name=adamw").losses
    for settings in LOWER_RUNGS.values():
        lower = outcome(ours, *settings)
        assert lower.losses == plain.losses
        assert all(torch.equal(lower.weights[name], weight) for name, weight in plain.weights.items())


def test_messages_and_remediations_know_it(add_optimizer, model):
    add_optimizer("signed_gradient", ROW)
    with pytest.raises(RecipeError, match="or signed_gradient, got lion_8bit"):
        recipe_of(model, "optimizer.name=lion_8bit", "offload.optimizer=host")
    recipe = recipe_of(model, "optimizer.name=signed_gradient")
    told = {key for way in remediations_for(recipe) for key in way.settings}
    assert told >= {"optimizer.state", "optimizer.in_backward", "offload.optimizer", "offload.parameters"}
    assert "optimizer.name" not in told


def test_what_it_costs_is_read_from_its_row(add_optimizer, model):
    add_optimizer("signed_gradient", ROW)
    name = keys.recipe_keys()["optimizer.name"]
    assert name.effect_of("signed_gradient") == ROW.effect
    exact = recipe_of(model, "optimizer.name=adamw")
    assert name.effect_of_change(exact, "signed_gradient").fidelity == "other mathematics"


def test_a_hyperparameter_at_0_leaves_it_the_state_that_its_row_does_not_deny(add_optimizer, model):
    add_optimizer("signed_gradient", ROW)
    add_optimizer("denied", dataclasses.replace(ROW, stateless_at_zero="momentum"))
    at_0 = recipe_of(model, "optimizer.name=signed_gradient", "optimizer.momentum=0", "optimizer.state=8bit")
    layer = torch.nn.Linear(64, 64, bias=False)
    optimizer = create_optimizer(layer, at_0.optimizer, learning_rate=1e-3)
    assert isinstance(optimizer, ChunkedOptimizer)
    optimizer.allocate_state()
    state = optimizer.state[layer.weight].values()
    held = sum(value.nbytes for value in state if isinstance(value, torch.Tensor))
    assert at_0.optimizer.state_bytes == held / layer.weight.numel() == table.AVERAGE_BYTES["8bit"]
    with pytest.raises(RecipeError, match=r"optimizer\.momentum=0 keeps none.* optimizer\.momentum=0\.9"):
        recipe_of(model, "optimizer.name=denied", "optimizer.momentum=0", "optimizer.state=8bit")
    assert recipe_of(model, "optimizer.name=denied", "optimizer.momentum=0").optimizer.state_bytes == 0


def test_a_hyperparameter_without_a_field_says_where_one_belongs(add_optimizer, model):
    add_optimizer("odd", dataclasses.replace(ROW, hyperparameters={"sharpness": 1.0}))
    with pytest.raises(AssertionError, match=r"takes sharpness: give OptimizerConfig a field"):
        recipe_of(model, "optimizer.name=adamw")


@pytest.mark.parametrize(
    "capability,settings",
    [
        ("moves_state_by_chunks", ["offload.optimizer=host"]),
        ("steps_in_backward", IN_BACKWARD),
        ("updates_by_slices", LOWER_RUNGS["streamed"]),
        ("takes_formats", ["optimizer.state=8bit"]),
    ],
)
def test_what_its_row_denies_is_refused_with_those_that_can_and_not_suggested(
    capability, settings, add_optimizer, model
):
    add_optimizer("odd", dataclasses.replace(ROW, **{capability: False}))
    recipe = recipe_of(model, "optimizer.name=odd")
    with pytest.raises(RecipeError, match=r"optimizer\.name=adamw.* got odd") as caught:
        recipe_of(model, "optimizer.name=odd", *settings)
    assert len(caught.value.problems) == 1
    denied = settings[-1].partition("=")[0] if capability != "steps_in_backward" else "optimizer.in_backward"
    ways = list(remediations_for(recipe))
    assert ways
    for way in ways:
        assert denied not in way.settings
        check_recipe(way.applied_to(recipe))
