"""The surroundings of a traced step offer what those of a real one offer, call for call."""

from __future__ import annotations

import inspect
import itertools
import re

import pytest
import torch
from transformers import LlamaConfig

from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.planning.estimator import runtime as estimator_runtime
from lowmem_ft.planning.estimator.runtime import model_on_meta, virtual_runtime
from lowmem_ft.planning.rehearsal import runtime as rehearsal_runtime
from lowmem_ft.recipe import TrainingConfig
from lowmem_ft.training.folder.run_files import RunFiles
from lowmem_ft.training.processes.ranks import Ranks
from lowmem_ft.training.runtimes import accelerate_runtime, deepspeed_runtime
from lowmem_ft.training.runtimes.values import Values
from lowmem_ft.training.step.machine import Machine
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.tracing_machine import TracingMachine

MODEL = ModelConfig(name_or_path="tiny")


def kinds_of(part: type) -> list[type]:
    """The classes that stand for a part in our runtimes, each after those that it overrides."""
    below = [kind for one in part.__subclasses__() if one.__module__ in MODULES for kind in kinds_of(one)]
    return [part, *below]


MODULES = {
    module.__name__
    for module in (accelerate_runtime, deepspeed_runtime, estimator_runtime, rehearsal_runtime)
}
KINDS = {part: kinds_of(part) for part in (Machine, Ranks, RunFiles, Values)}


def public_names(part: type) -> set[str]:
    """Names of its methods and attributes, those of its instances included."""
    sources = [inspect.getsource(kind) for kind in part.__mro__[:-1]]
    names = {*dir(part), *re.findall(r"\bself\.([a-z]\w*)", "".join(sources))}
    return {name for name in names if not name.startswith("_")}


METHODS = [
    (part, kind, name)
    for part, kinds in KINDS.items()
    for kind in kinds[1:]
    for name, _ in inspect.getmembers(part, inspect.isfunction)
    if not name.startswith("_")
]


def tiny_config(**changes) -> LlamaConfig:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    return LlamaConfig(**{**sizes, "vocab_size": 64, **changes})


def calls(function) -> list[tuple[str, inspect._ParameterKind]]:
    return [(one.name, one.kind) for one in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("part, kind, method", METHODS)
def test_each_method_is_called_the_same_way(part, kind, method):
    assert calls(getattr(kind, method)) == calls(getattr(part, method))


def test_there_are_methods_of_the_device_and_of_the_processes():
    assert {"load_model", "backward", "sum", "gather"} <= {name for _, _, name in METHODS}


def test_each_part_has_several_kinds():
    assert {part: len(kinds) for part, kinds in KINDS.items()} == {
        Machine: 3,
        Ranks: 4,
        RunFiles: 4,
        Values: 3,
    }


@pytest.mark.parametrize("part", itertools.chain(*KINDS.values()))
def test_a_part_has_few_names(part):
    assert 5 < len(public_names(part)) <= 18


def test_its_attributes_are_those_of_one_process_on_the_machines_device():
    runtime = virtual_runtime(TracingMachine(), TrainingConfig())
    assert (runtime.machine.device, runtime.ranks.num_processes) == (torch.device("cpu"), 1)


@pytest.mark.parametrize("weights", ["pretrained", "random"])
def test_a_model_is_loaded_with_a_storage_for_each_weight_and_no_values(weights, tmp_path):
    tiny_config().save_pretrained(tmp_path)
    with VirtualGPU("l4") as gpu:
        runtime = virtual_runtime(gpu, TrainingConfig())
        config = ModelConfig(name_or_path=str(tmp_path), weights=weights)
        model = runtime.values.load_model(config, tiny_config(), attn_implementation="sdpa", seed=1)
        prepared, _ = runtime.ranks.prepare(model, torch.optim.SGD(model.parameters()))
        assert prepared is model
        held = sum(parameter.nbytes for parameter in model.parameters())
        buffers = sum(buffer.nbytes for buffer in model.buffers())
        assert gpu.recorder.live_bytes == held + buffers
        assert all(parameter.device == gpu.device for parameter in model.parameters())


def test_a_config_that_makes_no_model_is_the_users_to_correct():
    with pytest.raises(ModelError, match="cannot build a llama model: KeyError 'no_such'"):
        model_on_meta(MODEL, tiny_config(hidden_act="no_such"))
