"""Preparation of a model before a trainer's constructor sees it."""

from __future__ import annotations

import copy
import dataclasses
import os
from typing import Any

import torch
from transformers import PreTrainedModel

from lowmem_ft.foundation.errors import UserError, raise_problems
from lowmem_ft.foundation.virtual_device import refuse_after_virtual_gpu
from lowmem_ft.hf.trainers.refusals import problems_of_whole_runs
from lowmem_ft.models.files.stored_quantization import problems_of_training
from lowmem_ft.models.hf_config import compute_dtype, load_model_config, other_parts_of, weights_dtype
from lowmem_ft.models.loading import load_model
from lowmem_ft.models.master_weights import MasterWeights, load_master_weights
from lowmem_ft.models.quantizing.stored_quantizers import packed_format
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.command_lines import command_line, quoted
from lowmem_ft.recipe.named_recipe import RecipeLike, as_recipe
from lowmem_ft.recipe.reading.keys import key_with
from lowmem_ft.recipe.reading.recipe_files import shipped_recipes
from lowmem_ft.techniques.adapters.lora import check_adapter, enable_lora
from lowmem_ft.techniques.attention.choose_attention import choose_attention

_SOURCE = "lowmem_ft_source"


def prepare_model(model: str | PreTrainedModel, recipe: RecipeLike) -> Any:
    """Return a model for a trainer's constructor: quantised, with adapters and on the host, as a recipe asks.

    A trainer's constructor moves the model to the device. A model whose weights are to be streamed waits on the host
    instead: it is marked as placed already (``hf_device_map``).

    Args:
        model: a hub id, folder or GGUF file, which is loaded by the recipe's ``model.*`` keys; or a loaded model.
        recipe: the recipe that will train it.

    Returns:
        The model, or a PEFT model around it with ``adapter.name=lora``, its adapters drawn by ``training.seed``. Pass
        it to the trainer without ``peft_config=``.

    Raises:
        UserError: if a loaded model is to be quantised, or is not on the required device, or packed weights are to be
            trained themselves.
        ModelError: if there is no such model, or its weights are damaged.
    """
    recipe = as_recipe(recipe)
    check_adapter(recipe.adapter)
    raise_problems(problems_of_whole_runs(recipe))
    is_on_host = key_with(recipe, "weights on host") is not None
    device = _device(recipe)
    if isinstance(model, str):
        model = _loaded(model, recipe, torch.device("cpu") if is_on_host else device)
    else:
        _refuse(model, recipe)
    if is_on_host:
        vars(model)["hf_device_map"] = {"": device}
    return _with_adapters(model, recipe) if recipe.adapter.name == "lora" else model


def full_precision_weights(model: Any) -> MasterWeights | None:
    """Return a checkpoint's weights where they are more precise than the model's, if :func:`prepare_model` read them.

    Weights that the script has changed since keep their current values. None for a PEFT model.
    """
    source = vars(model).get(_SOURCE)
    return None if source is None else load_master_weights(*source, present=model)


def _loaded(name: str, recipe: Recipe, device: torch.device) -> PreTrainedModel:
    config = dataclasses.replace(recipe.model, name_or_path=name)
    config.require_packages()
    if other_parts_of(config) is not None:
        own = recipe.name if recipe.name in shipped_recipes() else "my.yaml"
        train = quoted(command_line("train", f"recipe={own}", f"model={name}", "data=YOUR_DATA"))
        raise UserError(
            f"hf.prepare_model() loads a language model, and {name} has other parts, which a trainer's checkpoints "
            f"would lose. Train it with {train}, or pass a model that you have loaded."
        )
    hf_config = load_model_config(config)
    if (stored := packed_format(hf_config)) is not None and config.quantization != "dequantize":
        adapter = recipe.adapter
        raise_problems(problems_of_training(stored, name, adapter.name, None, use_dora=adapter.use_dora))
    attention = choose_attention(
        config.attn_implementation,
        config=hf_config,
        device=_device(recipe),
        compute_dtype=compute_dtype(weights_dtype(config, hf_config), recipe.training.mixed_precision),
        packing=recipe.data.packing,
        makes_batches=False,
    )
    model = load_model(
        config,
        hf_config,
        attn_implementation=attention.implementation,
        device=device,
        seed=recipe.training.seed,
        mixed_precision=recipe.training.mixed_precision,
    )
    vars(model)[_SOURCE] = config, copy.deepcopy(hf_config)
    return model


def _refuse(model: Any, recipe: Recipe) -> None:
    problems = []
    is_quantised = getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False)
    if recipe.model.quantization != "none" and not is_quantised:
        problems.append(
            f"model.quantization={recipe.model.quantization} happens when weights are read, and this model has its "
            "weights already. Pass its name to hf.prepare_model()."
        )
    devices = {parameter.device.type for parameter in model.parameters()}
    on_host = key_with(recipe, "weights on host")
    if on_host and devices != {"cpu"}:
        problems.append(
            f"{on_host.setting_in(recipe)} needs the weights on the host, got "
            f"{' and '.join(sorted(devices))}. Load the model without device_map, or pass its name to "
            "hf.prepare_model()."
        )
    if recipe.adapter.name == "lora" and hasattr(model, "get_base_model"):
        problems.append(
            "adapter.name=lora adds adapters to a plain model, got a PEFT model. Pass the base, or leave "
            "prepare_model() "
            "out."
        )
    elif recipe.adapter.name == "lora" and model.get_output_embeddings() is None:
        problems.append(
            f"adapter.name=lora adds adapters to a language model, got {type(model).__name__}, which has "
            "another head than lm_head, to be trained with them. Pass peft_config=peft.LoraConfig(...) to the trainer, "
            "and leave adapter.* out of the recipe."
        )
    if problems:
        raise UserError(*problems)


def _with_adapters(model: PreTrainedModel, recipe: Recipe) -> Any:
    """Add adapters as our own session does: in float32, drawn by the recipe's seed, whatever has drawn before."""
    with torch.random.fork_rng():
        torch.manual_seed(recipe.training.seed)
        return enable_lora(model, recipe.adapter).peft_model


def _device(recipe: Recipe) -> torch.device:
    """Return the device on which the trainer will train: this process's accelerator, if there is one."""
    if torch.cuda.is_available() and not recipe.training.use_cpu:
        refuse_after_virtual_gpu(torch.device("cuda"))
    accelerator = torch.accelerator.current_accelerator()
    if recipe.training.use_cpu or accelerator is None or not torch.accelerator.is_available():
        return torch.device("cpu")
    return torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK") or 0))
