"""Models that nothing is known of, or whose forward passes are not to be changed: refused by name."""

from __future__ import annotations

import pytest
import torch
from attached_trainers import recipe_of, rows, trainer_of
from stock_scripts import arguments
from tiny_models import tiny_llama
from torch import nn
from transformers import Trainer

from lowmem_ft import hf
from lowmem_ft.foundation.errors import UserError


class Words(nn.Module):
    """A model as somebody writes one, or as sentence-transformers has one: modules of transformers inside its own."""

    def __init__(self):
        super().__init__()
        self.model = tiny_llama()

    def forward(self, input_ids, labels=None, **kwargs):
        return {"loss": self.model(input_ids, labels=labels).loss}


def of_words(folder, model):
    return Trainer(model, arguments(folder), train_dataset=rows())


@pytest.mark.parametrize(
    "asked", [lambda: {"recipe": recipe_of()}, lambda: {"plan": "auto"}], ids=["recipe", "plan"]
)
def test_a_model_of_ones_own_is_refused_by_its_class(asked, tmp_path):
    with pytest.raises(UserError, match=r"models of transformers \(PreTrainedModel\).* got Words. For other"):
        hf.attach(of_words(tmp_path, Words()), **asked())


def test_a_recipe_is_not_read_from_a_model_of_ones_own(tmp_path):
    with pytest.raises(UserError, match=r"describes models of transformers.*got Words. .*estimate --script"):
        hf.recipe_from(of_words(tmp_path, Words()))


def compiled_whole(model):
    return torch.compile(model)


def compiled_in_place(model):
    model.compile()
    return model


def compiled_layer_by_layer(model):
    for layer in model.model.layers:
        layer.compile()
    return model


def compiled_layers(model):
    model.model.layers[0] = torch.compile(model.model.layers[0])
    return model


def compiled_forward(model):
    model.forward = torch.compile(model.forward)
    return model


@pytest.mark.parametrize(
    "compiled, words",
    [
        (compiled_whole, "of OptimizedModule."),
        (compiled_in_place, "of LlamaForCausalLM."),
        (compiled_layer_by_layer, "of model.layers.0."),
        (compiled_layers, "of model.layers.0."),
        (compiled_forward, "of LlamaForCausalLM."),
    ],
)
def test_what_torch_compile_has_taken_is_not_changed_behind_it(compiled, words, tmp_path):
    trainer, _ = trainer_of(tmp_path)
    trainer.model = compiled(trainer.model)
    with pytest.raises(UserError) as caught:
        hf.attach(trainer, recipe_of())
    (problem,) = caught.value.problems
    assert "torch.compile has already compiled" in problem
    assert words in problem
    assert "Leave torch.compile() and .compile() out." in problem


def test_a_recipe_is_read_from_a_compiled_model_as_from_the_plain_one(tmp_path):
    trainer, _ = trainer_of(tmp_path)
    plain = hf.recipe_from(trainer)
    trainer.model = torch.compile(trainer.model)
    compiled = hf.recipe_from(trainer)
    assert (compiled.model.dtype, compiled.optimizer, compiled.data) == (
        plain.model.dtype,
        plain.optimizer,
        plain.data,
    )
