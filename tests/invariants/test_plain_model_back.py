"""What a closed session leaves is the plain model with the trained weights, at every rung of the ladder."""

import gc
import weakref

import pytest
import torch
from batches import batch_of_two
from ladder_rungs import RUNGS, settings_of
from measuring.families import FAMILIES, VOCABULARY
from transformers import AutoConfig, AutoModelForCausalLM

from lowmem_ft.recipe import load_recipe
from lowmem_ft.techniques.adapters.trained_adapter import Lora
from lowmem_ft.training.runtimes.accelerate_runtime import launched_runtime
from lowmem_ft.training.runtimes.build import build_session, plan_session
from lowmem_ft.training.step.step import train_step

ADAPTERS = ("adapter.name=lora", "adapter.r=4")
STARTS = {rung.name: settings_of(rung) for rung in RUNGS}
STARTS["adapters beside a streamed base"] = (*settings_of(RUNGS[1]), *ADAPTERS, "offload.parameters=stream")
STARTS["adapters, all activations away"] = (*ADAPTERS, "offload.activations=all", "tiling.mlp=3")


QUICK = ("gemma2", "qwen3_moe")
"""The families that `make test` takes in turn, one a start."""


def starts():
    for number, start in enumerate(STARTS):
        for family in ("qwen2", *QUICK):
            is_quick = family == QUICK[number % len(QUICK)]
            yield pytest.param(start, family, marks=[] if is_quick else pytest.mark.slow)


@pytest.fixture
def folder(family, tmp_path):
    AutoConfig.for_model(**{"model_type": family, **FAMILIES[family]}).save_pretrained(tmp_path)
    return tmp_path


def built(settings, folder):
    recipe = load_recipe(
        None,
        [
            *settings,
            f"model={folder}",
            "model.weights=random",
            "training.use_cpu=true",
            "training.gradient_accumulation_steps=2",
            "training.per_device_train_batch_size=2",
            "data=any",
        ],
    )
    runtime = launched_runtime(recipe.training, folder)
    return build_session(recipe, runtime, plan_session(recipe, runtime), num_training_steps=3)


OF_PARAMETERS = ("shape", "dtype", "device", "requires_grad", "grad", "grad_dtype", "__dict__")


def visible(model):
    """What of a model a technique might leave changed, its weights' values apart."""
    modules = {
        name: (type(module), module.training, sorted(vars(module)), num_hooks(module))
        for name, module in model.named_modules()
    }
    parameters = {
        name: [*(getattr(p, attribute) for attribute in OF_PARAMETERS), has_hooks(p)]
        for name, p in model.named_parameters(remove_duplicate=False)
    }
    return modules, parameters, model.config.to_dict()


def has_hooks(parameter):
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def num_hooks(module):
    return sum(len(value) for name, value in vars(module).items() if name.endswith("_hooks"))


def loss_and_gradients(model):
    ids_BT = batch_of_two(7, 33, VOCABULARY).input_ids_BT
    loss = model(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("start, family", starts())
def test_a_closed_session_leaves_the_trained_model_and_nothing_else(start, folder):
    session = built(STARTS[start], folder)
    for step in range(2):
        train_step(session, [batch_of_two(seed, 33, VOCABULARY) for seed in (2 * step, 2 * step + 1)])
    model, adapter = session.unwrapped_model, session.techniques.find(Lora)
    references = [weakref.ref(part) for part in (session.optimizer, *session.techniques)]
    session.close()
    if adapter is not None:
        adapter.remove()
    del session, adapter
    gc.collect()
    assert not [reference for reference in references if reference() is not None]

    plain = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder),
        dtype=model.dtype,
        attn_implementation=model.config._attn_implementation,
    ).train()
    plain.load_state_dict(model.state_dict())
    assert visible(model) == visible(plain)
    assert all(map(torch.equal, loss_and_gradients(model), loss_and_gradients(plain)))
