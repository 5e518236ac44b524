"""What no estimate can be made of is explained: the rule, what was seen, the way out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.foundation.errors import ModelError, UserError
from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.planning.estimator import CannotRun, estimate_memory, estimate_on_gpus
from lowmem_ft.recipe import Recipe, load_recipe

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}


class OddConfig(LlamaConfig):
    model_type = "odd_llama"


class OddModel(LlamaForCausalLM):
    """A Llama whose forward also does something odd with a weight."""

    config_class = OddConfig
    odd = staticmethod(torch.Tensor.sum)

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        self.odd(self.lm_head.weight.detach())
        return output


@pytest.fixture(scope="module", autouse=True)
def odd_architecture():
    AutoConfig.register("odd_llama", OddConfig)
    AutoModelForCausalLM.register(OddConfig, OddModel)
    yield
    del CONFIG_MAPPING._extra_content["odd_llama"]
    del AutoModelForCausalLM._model_mapping._extra_content[OddConfig]


@pytest.fixture
def odd_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def make(odd) -> Recipe:
        OddConfig(**SIZES).save_pretrained(tmp_path)
        monkeypatch.setattr(OddModel, "odd", staticmethod(odd))
        return load_recipe(None, [f"model={tmp_path}", "data.max_length=128", "loss.chunk_tokens=null"])

    return make


def counts(weight_VD: Tensor) -> Tensor:
    return torch.bincount((weight_VD[:, 0] > 0).long())


def as_array(weight_VD: Tensor):
    return weight_VD.cpu().numpy()


@pytest.mark.parametrize("odd,operator", [(counts, "aten.bincount"), (as_array, "Tensor.numpy()")])
@pytest.mark.parametrize("gpu", ["l4", "cpu"])
def test_a_forward_that_cannot_be_traced_is_told_which_operator_and_what_to_do(
    odd_recipe, odd, operator, gpu
):
    with pytest.raises(ModelError) as raised:
        estimate_memory(odd_recipe(odd), gpu)
    (problem,) = raised.value.problems
    assert operator in problem
    assert "depends on values that a trace does not have" in problem
    assert "rite " in problem


def rows_above_zero(weight_VD: Tensor) -> list[Tensor]:
    return [weight_VD[row] for row, _ in (weight_VD > 0).nonzero()[:4]]


def test_a_result_whose_size_depends_on_values_is_taken_at_its_largest_and_that_is_said(odd_recipe):
    estimate = estimate_memory(odd_recipe(rows_above_zero), "l4")
    assert "taken at their largest, as values decide: aten.nonzero.default" in estimate.choices


def test_our_own_mistakes_are_not_taken_for_the_models(odd_recipe):
    def fails(weight_VD: Tensor) -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        estimate_memory(odd_recipe(fails), "l4")


def test_the_attention_that_cuda_falls_back_to_is_said():
    choices = estimate_memory(load_recipe("tiny", ["training.mixed_precision=fp16"]), "t4").choices
    kernel = (
        "memory-efficient kernel"  # since torch 2.14 for grouped heads; before, heads are repeated for it
    )
    assert any(kernel in choice and "got 7.5" in choice for choice in choices)


def test_one_gpu_that_cannot_does_not_keep_the_others_from_it():
    recipe = load_recipe("tiny", ["training.mixed_precision=bf16"])
    on_t4, on_l4 = estimate_on_gpus(recipe, [find_gpu("t4"), find_gpu("l4")])
    assert isinstance(on_t4, CannotRun)
    assert on_t4.problems[0].startswith("bfloat16 needs a GPU that computes with it")
    assert isinstance(on_l4, MemoryEstimate)
    with pytest.raises(UserError, match="bfloat16 needs"):
        estimate_on_gpus(recipe, [find_gpu("t4")])


def test_a_trace_that_takes_long_says_so_once(monkeypatch, tmp_path, caplog):
    """As of RWKV, whose layers go through the positions in a Python loop."""
    monkeypatch.setattr("lowmem_ft.planning.estimator.traces.tracing.LONG_SECONDS", 0.0)
    LlamaConfig(**SIZES).save_pretrained(tmp_path)
    recipe = load_recipe("tiny", [f"model={tmp_path}", "data.max_length=60"])
    for _ in range(2):
        estimate_memory(recipe, "l4")
    said = [record.getMessage() for record in caplog.records if "takes long" in record.getMessage()]
    assert len(said) == 1
    assert f"{tmp_path} (llama)" in said[0]
    assert "data.max_length=6)" in said[0]


def test_a_trace_that_waits_for_a_busy_machine_is_not_called_long(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr("lowmem_ft.planning.estimator.traces.tracing.LONG_SECONDS", 0.005)
    monkeypatch.setattr("lowmem_ft.planning.estimator.traces.tracing.time.process_time", lambda: 1.0)
    LlamaConfig(**SIZES).save_pretrained(tmp_path)
    estimate_memory(load_recipe("tiny", [f"model={tmp_path}"]), "l4")
    assert not [record for record in caplog.records if "takes long" in record.getMessage()]


def test_more_layers_than_the_model_has_are_told_by_its_own_number(tmp_path):
    """Though a few layers represent all of them."""
    LlamaConfig(**SIZES | {"num_hidden_layers": 24}).save_pretrained(tmp_path)
    settings = [f"model={tmp_path}", "checkpointing.mode=full", "checkpointing.skip_last_layers=24"]
    with pytest.raises(UserError, match="from 0 to 23 with a model of 24 layers, got 24"):
        estimate_memory(load_recipe(None, settings), "rtx-4090")
