"""The surroundings of a traced step offer what those of a real one offer, call for call."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers import LlamaConfig

from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.planning.estimator.runtime import VirtualRuntime, model_on_meta
from lowmem_ft.recipe import TrainingConfig
from lowmem_ft.training.accelerate_runtime import AccelerateRuntime
from lowmem_ft.training.runtime import Runtime
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.tracing_machine import TracingMachine

MODEL = ModelConfig(name_or_path="tiny")
METHODS = [name for name, _ in inspect.getmembers(Runtime, inspect.isfunction) if not name.startswith("_")]


def tiny_config(**changes) -> LlamaConfig:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    return LlamaConfig(**{**sizes, "vocab_size": 64, **changes})


def calls(function) -> list[tuple[str, inspect._ParameterKind]]:
    return [(one.name, one.kind) for one in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("runtime", [AccelerateRuntime, VirtualRuntime])
def test_each_method_is_called_the_same_way(runtime, method):
    assert calls(getattr(runtime, method)) == calls(getattr(Runtime, method))


def test_there_are_methods_of_the_device_and_of_the_processes():
    assert {"load_model", "backward", "sum_over_processes", "gather"} <= set(METHODS)


def test_its_attributes_are_those_of_one_process_on_the_machines_device():
    runtime = VirtualRuntime(TracingMachine(), TrainingConfig())
    assert (runtime.device, runtime.num_processes) == (torch.device("cpu"), 1)


@pytest.mark.parametrize("weights", ["pretrained", "random"])
def test_a_model_is_loaded_with_a_storage_for_each_weight_and_no_values(weights, tmp_path):
    tiny_config().save_pretrained(tmp_path)
    with VirtualGPU("l4") as gpu:
        runtime = VirtualRuntime(gpu, TrainingConfig())
        config = ModelConfig(name_or_path=str(tmp_path), weights=weights)
        model = runtime.load_model(config, tiny_config(), attn_implementation="sdpa", seed=1)
        prepared, _ = runtime.prepare(model, torch.optim.SGD(model.parameters()))
        assert prepared is model
        held = sum(parameter.nbytes for parameter in model.parameters())
        buffers = sum(buffer.nbytes for buffer in model.buffers())
        assert gpu.recorder.live_bytes == held + buffers
        assert all(parameter.device == gpu.device for parameter in model.parameters())


def test_a_config_that_makes_no_model_is_the_users_to_correct():
    with pytest.raises(ModelError, match="cannot build a llama model: KeyError 'no_such'"):
        model_on_meta(MODEL, tiny_config(hidden_act="no_such"))
