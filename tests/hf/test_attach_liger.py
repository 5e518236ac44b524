"""``use_liger_kernel=True`` of a trainer that a recipe is attached to: the recipe's operators, and nobody's loss."""

from __future__ import annotations

import pytest
from attached_trainers import problems_of, recipe_of, trainer_of
from roundings import LOSS
from tiny_models import tiny_llama

pytest.importorskip("liger_kernel", reason="Liger needs Triton, which this system has not")

from transcribed_liger import transcribed_kernels

from lowmem_ft import hf
from lowmem_ft.techniques.kernels.fused_operators import FusedOperators


@pytest.fixture(autouse=True)
def _transcribed():
    with transcribed_kernels():
        yield


def test_the_flag_becomes_the_recipes_kernels_and_comes_back(tmp_path):
    stock, of_stock = trainer_of(tmp_path / "stock")
    stock.train()
    trainer, meter = trainer_of(tmp_path / "ours", model=tiny_llama(), fields={"use_liger_kernel": True})
    attached = hf.attach(trainer, recipe_of("loss.chunk_tokens=32", "checkpointing.mode=full"))
    assert attached.recipe.model.kernels == "liger"
    assert "model.kernels=liger" in attached.applied
    assert trainer.args.use_liger_kernel is False  # Trainer would replace the model's forward, and its loss
    operators = attached.techniques.find(FusedOperators)
    assert operators is not None
    assert operators.operators == ("rms_norm", "rotary", "swiglu")
    trainer.train()
    assert meter.losses == pytest.approx(of_stock.losses, abs=8 * LOSS)
    attached.remove()
    assert trainer.args.use_liger_kernel is True
    assert not any("forward" in vars(module) for module in trainer.model.model.layers.modules())


def test_what_the_flag_asks_for_besides_is_refused_with_a_way_out(tmp_path):
    trainer, _ = trainer_of(tmp_path, fields={"use_liger_kernel": True})
    (problem,) = problems_of(trainer, "loss.chunk_tokens=null")
    assert "also replaces the loss" in problem
    trainer.args.liger_kernel_config = {"fused_linear_cross_entropy": False}
    hf.attach(trainer, recipe_of("loss.chunk_tokens=null")).remove()
    trainer.args.liger_kernel_config = {"rope": False}
    (problem,) = problems_of(trainer)
    assert "liger_kernel_config leaves out rope" in problem


def test_a_recipe_with_the_kernels_is_attached_as_it_is(tmp_path):
    trainer, _ = trainer_of(tmp_path)
    attached = hf.attach(trainer, recipe_of("model.kernels=liger"))
    assert attached.techniques.find(FusedOperators) is not None
    attached.remove()
