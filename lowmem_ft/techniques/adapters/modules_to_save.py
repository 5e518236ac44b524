"""The modules that are trained and saved whole next to the adapters, by the names that PEFT is asked for.

PEFT trains a copy of each and keeps the original. Here the module itself is trained, as in full fine-tuning, so that
it takes its place once; its files are PEFT's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from lowmem_ft.foundation.errors import did_you_mean, raise_problems
from lowmem_ft.techniques.adapters.adapter_folder import WEIGHTS_FILE
from lowmem_ft.techniques.adapters.config import AdapterConfig
from lowmem_ft.techniques.adapters.whole_model import WholeModel

TRAINABLE = (torch.float32, torch.bfloat16)


def modules_to_save(
    model: PreTrainedModel, config: AdapterConfig, whole: WholeModel | None
) -> dict[str, nn.Module]:
    """Return the modules to train, by their names in the model.

    Raises:
        UserError: if a name matches no module, or PEFT would take it for others, too; if a module's weights have no
            room for updates; if a head is named that is the embedding's weight; or for a model of several parts.
    """
    wanted = config.modules_to_save
    if not wanted:
        return {}
    modules = {name: module for name, module in model.named_modules() if name}
    problems, found = [], dict[str, nn.Module]()
    if whole is not None:
        problems.append(
            f"adapter.modules_to_save needs a text-only model, got [{', '.join(wanted)}] for the one of a model "
            "of several parts, in which PEFT would find modules of the others by these names. Leave the key out."
        )
    for target in wanted:
        named = {name for name in modules if name == target or name.endswith(f".{target}")}
        if not named:
            shorts = sorted({name.rpartition(".")[2] for name in modules if list(modules[name].parameters())})
            problems.append(
                f"adapter.modules_to_save names modules, and {type(model).__name__} has none {target!r}."
                f"{did_you_mean(target, shorts)} Its embedding and head are {', '.join(_ends(model))}."
            )
        elif others := sorted({name for name in modules if name.endswith(target)} - named):
            problems.append(
                f"adapter.modules_to_save={target} names {sorted(named)[0]}, and PEFT would train {others[0]} for it, "
                f"too. Write the name with its parents, such as {sorted(named)[0]}."
            )
        found |= {name: modules[name] for name in named}
    for name, module in found.items():
        types = {parameter.dtype for parameter in module.parameters()}
        if not types:
            problems.append(
                f"adapter.modules_to_save trains parameters, and {name} has none. Leave it out, or name its layers."
            )
        elif wrong := types.difference(TRAINABLE):
            problems.append(
                f"adapter.modules_to_save trains weights in float32 or bfloat16, and those of {name} are "
                f"{str(sorted(wrong, key=str)[0]).removeprefix('torch.')}. Leave it out, or set model.dtype=bfloat16 "
                "and model.quantization=none."
            )
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    chosen = list(found.values())
    if is_tied(model) and any(one is head for one in chosen) and not any(one is table for one in chosen):
        problems.append(
            f"adapter.modules_to_save names the head of {type(model).__name__}, whose weight is the embedding's. Name "
            f"{_ends(model)[0]}, which trains both."
        )
    raise_problems(problems)
    return found


def is_tied(model: Any) -> bool:
    """Return whether a model's head has the weight of its embedding."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    return table is not None and head is not None and table.weight is head.weight


def _ends(model: PreTrainedModel) -> list[str]:
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return [name for end in ends for name, module in model.named_modules() if module is end]


def add_to_file(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Add tensors to an adapter's file, by their names there."""
    if tensors:
        whole = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
            for name, tensor in tensors.items()
        }  # copies, as a file holds no two names of one storage
        save_file(load_file(folder / WEIGHTS_FILE) | whole, folder / WEIGHTS_FILE, {"format": "pt"})
