"""The model of a user's script in a recipe's terms: its architecture, type, quantisation and adapters."""

from __future__ import annotations

import functools
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from lowmem_ft.foundation.tensors.logical_size import logical_numel
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.planning.script_recipes.untranslated import Reading, script_estimate
from lowmem_ft.recipe.reading.keys import recipe_keys
from lowmem_ft.techniques.adapters.config import AdapterConfig
from lowmem_ft.techniques.adapters.target_modules import ALL_LINEAR
from lowmem_ft.techniques.attention.grouped_attention import documented_name
from lowmem_ft.techniques.modules.model_parts import base_model

_NOT_OF_THE_ARCHITECTURE = (
    "architectures attn_implementation bos_token_id dtype eos_token_id pad_token_id quantization_config "
    "transformers_version use_cache"
)
"""Config keys that neither shapes nor layers depend on."""

_OTHER_WEIGHTS = {
    "modules_to_save": "trains whole copies of these modules",
    "rank_pattern": "gives some layers other ranks",
    "layers_to_transform": "leaves layers out",
    "exclude_modules": "leaves modules out",
    "trainable_token_indices": "trains rows of the embedding",
}
"""Settings of PEFT's that a recipe has no key for, and that change what is trained."""


def model_config(model: nn.Module, reading: Reading) -> ModelConfig:
    """Return the model group of the recipe.

    Args:
        model: the script's model, in PEFT's wrapper or not.
        reading: collects what has no counterpart.
    """
    base = base_model(model)
    name, weights = _source_of(base.config, reading)
    quantization = _quantization(base, reading)
    return ModelConfig(
        name_or_path=name,
        weights=weights,
        dtype=_weights_type(base, reading),
        quantization=quantization,
        attn_implementation=_attention(base.config, reading),
    )


def quantization_of(model: nn.Module) -> Literal["none", "int8", "nf4"]:
    """Return the model's bitsandbytes quantisation, by the recipe's names."""
    if getattr(model, "is_loaded_in_8bit", False):
        return "int8"
    return "nf4" if getattr(model, "is_loaded_in_4bit", False) else "none"


def weights_type(model: nn.Module) -> str:
    """Return the type of most of the weights, such as ``bfloat16``, without adapters and quantised weights."""
    ((dtype, _),) = _numbers_by_type(model).most_common(1)
    return str(dtype).removeprefix("torch.")


def _numbers_by_type(model: nn.Module) -> Counter[torch.dtype]:
    """Count the elements of weights of each floating type, without adapters and quantised weights."""
    numbers: Counter[torch.dtype] = Counter()
    for name, parameter in model.named_parameters():
        if "lora_" not in name and parameter.is_floating_point():
            numbers[parameter.dtype] += parameter.numel()
    return numbers


def adapter_config(model: nn.Module, reading: Reading) -> AdapterConfig:
    """Return the adapter group of the recipe.

    Args:
        model: the script's model.
        reading: collects what has no counterpart.
    """
    adapters = getattr(model, "peft_config", None)
    if not adapters:
        _refuse_frozen_parts(model, reading)
        return AdapterConfig()
    if len(adapters) > 1:
        reading.problem(f"A recipe has one adapter, and the model has {', '.join(adapters)}. Keep one.")
    config = next(iter(adapters.values()))
    if (kind := str(getattr(config.peft_type, "value", config.peft_type))) != "LORA":
        reading.problem(f"A recipe's adapter is LoRA, and the model has PEFT's {kind}.")
        return AdapterConfig()
    for setting, what in _OTHER_WEIGHTS.items():
        if value := getattr(config, setting, None):
            reading.problem(f"LoraConfig({setting}={value!r}) {what}, which a recipe's adapter does not.")
    if config.bias != "none":
        reading.problem(f"LoraConfig(bias={config.bias!r}) trains biases, which a recipe's adapter does not.")
    return AdapterConfig(
        name="lora",
        r=config.r,
        lora_alpha=float(config.lora_alpha),
        lora_dropout=float(config.lora_dropout),
        target_modules=_adapted_layers(base_model(model), config.target_modules),
        target_parameters=tuple(sorted(getattr(config, "target_parameters", None) or ())),
        use_dora=bool(config.use_dora),
        use_rslora=bool(config.use_rslora),
    )


def _adapted_layers(model: Any, said: Any) -> tuple[str, ...]:
    """Return ``all-linear`` if every linear layer except the head is adapted, else the names that PEFT was given."""
    head = model.get_output_embeddings()
    alone = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module is not head
        and "lora_" not in name
        and not name.endswith(".base_layer")
    ]
    if not alone:
        return (ALL_LINEAR,)
    return (said,) if isinstance(said, str) else tuple(sorted(said))


def _refuse_frozen_parts(model: nn.Module, reading: Reading) -> None:
    frozen = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    if frozen:
        total = sum(map(logical_numel, model.parameters()))
        reading.problem(
            f"A recipe trains all weights or LoRA adapters, but {frozen:,} of the model's {total:,} parameters are "
            f"frozen without adapters. {script_estimate()}"
        )


def _source_of(config: PretrainedConfig, reading: Reading) -> tuple[str, Any]:
    """Return where the architecture can be read again; write it down for a changed model or one without files."""
    name = config.name_or_path or ""
    if name and (Path(name).is_dir() or not Path(name).is_absolute()):
        try:
            found = AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError):
            found = None
        if found is not None and _architecture(found) == _architecture(config):
            return name, "pretrained"
        if found is not None:
            reading.warn(
                f"The model's config is no longer that of {name}: the recipe has a copy of the current architecture, "
                "for estimates and plans; it cannot load the weights."
            )
    configs = Path(_folder_of_configs().name)
    folder = configs / f"{len(list(configs.iterdir()))}-{config.model_type}"
    PretrainedConfig.save_pretrained(config, folder)
    return str(folder), "random"


@functools.cache
def _folder_of_configs() -> tempfile.TemporaryDirectory[str]:
    """Return the folder that is deleted with the process."""
    return tempfile.TemporaryDirectory(prefix="lowmem_ft-")


def _architecture(config: PretrainedConfig) -> dict[str, Any]:
    return {
        name: value
        for name, value in config.to_dict().items()
        if not name.startswith("_") and name not in _NOT_OF_THE_ARCHITECTURE.split()
    }


def _attention(config: PretrainedConfig, reading: Reading) -> Any:
    chosen = documented_name(config._attn_implementation or "")
    if chosen in recipe_keys()["model.attn_implementation"].choices:
        return chosen
    reading.warn(
        f"attn_implementation={chosen} has no counterpart in a recipe: model.attn_implementation=auto replaces it, "
        "whose attention buffers may differ."
    )
    return "auto"


def _quantization(model: Any, reading: Reading) -> Any:
    quantization = quantization_of(model)
    if quantization == "nf4":
        config = model.config.quantization_config
        if config.bnb_4bit_quant_type != "nf4":
            reading.warn(
                f"bnb_4bit_quant_type={config.bnb_4bit_quant_type} takes as many bytes as the recipe's nf4."
            )
        if not config.bnb_4bit_use_double_quant:
            weights = sum(
                logical_numel(one) for one in model.parameters() if type(one).__name__ == "Params4bit"
            )
            reading.warn(
                "bnb_4bit_use_double_quant=False keeps a float32 scale for each 64 weights, about "
                f"{format_bytes(round(weights * 3 / 64))} more than the recipe's nf4."
            )
    elif quantization == "none" and getattr(model, "hf_quantizer", None) is not None:
        method = getattr(model.config, "quantization_config", None)
        reading.problem(
            f"A recipe knows bitsandbytes' nf4 and int8, but the model is quantized by {type(method).__name__}."
        )
    return quantization


def _weights_type(model: nn.Module, reading: Reading) -> Any:
    """Return the type of most weights, without adapters and quantised ones; warn of the bytes that other types add."""
    numbers = _numbers_by_type(model)
    if not numbers:
        return "float32"
    ((dtype, _),) = numbers.most_common(1)
    name = str(dtype).removeprefix("torch.")
    if name not in recipe_keys()["model.dtype"].choices:
        reading.problem(
            f"A recipe's weights are float32, bfloat16 or float16, and most of the model's are {name}."
        )
        return "float32"
    more = sum(number * (other.itemsize - dtype.itemsize) for other, number in numbers.items())
    if more:
        others = ", ".join(str(other).removeprefix("torch.") for other in numbers if other != dtype)
        direction = "more" if more > 0 else "less"
        reading.warn(
            f"Some weights are {others} while most are {name}: without their gradients they take "
            f"{format_bytes(abs(more))} {direction} than the recipe says."
        )
    return name
