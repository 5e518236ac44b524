"""The parameters that get an adapter of their own, by the names that PEFT is asked for: experts that are one tensor."""

from __future__ import annotations

import re

from torch import nn

from lowmem_ft.foundation.errors import UserError, did_you_mean, raise_problems
from lowmem_ft.foundation.tensors.logical_size import logical_shape
from lowmem_ft.techniques.adapters.config import AdapterConfig
from lowmem_ft.techniques.adapters.target_modules import source_of

_OF_A_LAYER = re.compile(r"^.*?\.\d+\.")


def target_parameters(model: nn.Module, config: AdapterConfig) -> list[str]:
    """Return the parameters to request from PEFT, which would ignore a name that matches none.

    Raises:
        UserError: if a name matches no parameter, or one that is no matrix and no tensor of matrices.
    """
    shapes = {name: logical_shape(parameter) for name, parameter in model.named_parameters()}
    fused = sorted({_OF_A_LAYER.sub("", name) for name, shape in shapes.items() if len(shape) == 3})
    way_out = f"It has {', '.join(fused)}." if fused else "It has no fused experts: leave the key out."
    problems = []
    if config.target_parameters and any(hasattr(one, "packed_shape") for one in model.parameters()):
        raise UserError(
            "adapter.target_parameters adapts experts in 16 bits, or that model.quantization packs; those of this base "
            "stay in the format of its files. Set model.quantization=dequantize, or leave the key out."
        )
    for target in config.target_parameters:
        named = [name for name in shapes if name == target or name.endswith(f".{target}")]
        if not named:
            problems.append(
                f"adapter.target_parameters names parameters, and {type(model).__name__} has none {target!r}."
                f"{did_you_mean(target, fused)} {way_out}"
            )
        for name in named[:1]:
            num_axes = len(shapes[name])
            if num_axes not in (2, 3):
                problems.append(
                    f"adapter.target_parameters names parameters of 3 axes, or 2, and {name} has {num_axes}. {way_out}"
                )
            elif name.endswith("bias"):
                problems.append(
                    f"adapter.target_parameters names matrices, and {name} of {type(model).__name__} is a bias of each "
                    f"expert. {way_out}"
                )
            elif _is_read_elsewhere(model, name):
                problems.append(
                    f"adapter.target_parameters names parameters that their own module multiplies by; {name} of "
                    f"{type(model).__name__} is read by the module around it, which PEFT's adapter does not allow. "
                    f"Leave the key out, and name linear layers in adapter.target_modules."
                )
            elif isinstance(model.get_submodule(name.rpartition(".")[0]), (nn.Linear, nn.Embedding)):
                problems.append(
                    f"adapter.target_parameters names no weight of a linear layer or an embedding, got {target!r}. "
                    f"Name a linear layer in adapter.target_modules. {way_out}"
                )
    raise_problems(problems)
    return list(config.target_parameters)


def _is_read_elsewhere(model: nn.Module, name: str) -> bool:
    """Return whether the module around a parameter's own reads it, as DBRX's experts do."""
    holder, _, parameter = name.rpartition(".")
    around, _, child = holder.rpartition(".")
    pattern = rf"self\.{child}\.{parameter}\b"
    return bool(child) and re.search(pattern, source_of(type(model.get_submodule(around)))) is not None
