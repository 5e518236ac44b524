"""Optimizer state by parameter name, as plain tensors and JSON, so that a checkpoint needs no pickle.

``torch.optim.Optimizer.state_dict`` numbers parameters by position, and loading it casts state to the type of the
weight, which spoils float32 state of bfloat16 weights; bitsandbytes' paged state does not come back paged. State of our
own optimizers is written in its own format, and read into whatever formats the resumed run uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowmem_ft.foundation.errors import CheckpointError, raise_problems
from lowmem_ft.foundation.tensors.local_shards import (
    first_element,
    is_held_once,
    is_sharded,
    local_part,
    part_number,
    parts_of,
)
from lowmem_ft.optimizers.chunked.chunked_optimizer import ChunkedOptimizer
from lowmem_ft.optimizers.chunked.saved_state_conversion import SavedState, take_state
from lowmem_ft.optimizers.state.state_parts import StateParts, state_here
from lowmem_ft.optimizers.updates.bitsandbytes_optimizers import AllocatesState

# They choose a kernel, not the mathematics: the run that resumes keeps its own.
_KERNEL_CHOICES = {"fused", "foreach", "capturable", "differentiable"}

# Tables that bitsandbytes shares between all its parameters, and creates itself again.
_CONSTANTS = {"qmap1", "qmap2"}


@dataclass(frozen=True, kw_only=True)
class OptimizerState:
    """Everything that an optimizer knows in addition to its parameters.

    Args:
        tensors: by ``{parameter name}.{state key}``; exported, the live tensors, not copies: write them before the next
            step; for a sharded parameter, this process's part. On import, each is read once, so that they can come from
            files one at a time, and may be a :class:`StateParts`.
        scalars: values that JSON can hold: the optimizer's kind, each group's hyperparameters and shapes, and state
            that is no tensor.
        places: for a sharded parameter's exported tensors, by the same names: where this process's part begins, and the
            length of the whole.
    """

    tensors: Mapping[str, Any]
    scalars: dict[str, Any]
    places: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def export_optimizer_state(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]]
) -> OptimizerState:
    """Return the state of an optimizer under the names of its parameters.

    Args:
        optimizer: the optimizer itself, not Accelerate's wrapper around it.
        named_parameters: from ``model.named_parameters()``, with or without frozen ones.

    Returns:
        The state; its tensors are shared with the optimizer.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in named_parameters}
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    places: dict[str, tuple[int, int]] = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                if key not in _CONSTANTS:
                    tensors[f"{names[parameter]}.{key}"] = value.detach()
                    if is_held_once(parameter):
                        places[f"{names[parameter]}.{key}"] = _place_of(optimizer, parameter, key)
            else:
                scalars.setdefault(names[parameter], {})[key] = value
    return OptimizerState(
        tensors=tensors,
        scalars={
            "optimizer": _kind(optimizer),
            "groups": [_export_group(group, names) for group in optimizer.param_groups],
            "state": scalars,
            **_export_formats(optimizer, names),
        },
        places=places,
    )


def import_optimizer_state(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    state: OptimizerState,
    saved_weight: Callable[[str], Tensor | None] = lambda name: None,
) -> None:
    """Restore what :func:`export_optimizer_state` returned, bit for bit if the formats are the same.

    Every tensor goes where this optimizer keeps it: to its home, to managed memory if it is paged, a step counter to
    the host unless the kernel needs it on the device. Tensors are copied one at a time. An optimizer of ours takes
    state of the same optimizer in any formats (see :mod:`state_conversion`).

    Args:
        optimizer: one of the same kind over the same parameters; the optimizer itself, not Accelerate's wrapper.
        named_parameters: from ``model.named_parameters()``; they hold the saved weights already.
        state: from memory or from files; its tensors are copied, never kept.
        saved_weight: returns the weight of that name as it was saved, or None. Called if it was finer than this
            model's: a float32 checkpoint may resume with bfloat16 weights, and their master begins from it.

    Raises:
        CheckpointError: naming every difference in kind, parameters, shapes or types.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in named_parameters}
    problems = _differences(optimizer, names, state.scalars)
    raise_problems(problems, CheckpointError)
    for group, saved in zip(optimizer.param_groups, state.scalars["groups"], strict=True):
        for key, value in saved["hyperparameters"].items():
            group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
    keys = _keys_by_parameter(state.tensors)
    if isinstance(optimizer, ChunkedOptimizer):
        _take_states(optimizer, names, state, keys, saved_weight)
        return
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            name = names[parameter]
            scalars = state.scalars["state"].get(name, {})
            optimizer.state.pop(parameter, None)
            if name not in keys and not scalars:
                continue  # it never had a gradient
            tensors = {key: state.tensors[f"{name}.{key}"] for key in keys.get(name, [])}
            if isinstance(optimizer, AllocatesState):
                optimizer.init_state(group, parameter, group_index, index)
                _fill(name, optimizer.state[parameter], tensors)
            else:
                optimizer.state[parameter].update(_place(tensors, parameter, group))
            optimizer.state[parameter].update(scalars)


def _place_of(optimizer: Optimizer, parameter: Any, key: str) -> tuple[int, int]:
    """Return where this process's part of a sharded parameter's state begins in the whole, and the whole's length."""
    if not isinstance(optimizer, ChunkedOptimizer):
        raise TypeError(
            f"Only the optimizers of lowmem_ft save the state of sharded parameters, got {type(optimizer).__name__}."
        )
    lengths = [optimizer.kept_sizes(parameter, elements)[key][0] for elements in parts_of(parameter)]
    return sum(lengths[: part_number(parameter)]), sum(lengths)


def _take_states(
    optimizer: ChunkedOptimizer,
    names: Mapping[Tensor, str],
    state: OptimizerState,
    keys: Mapping[str, Iterable[str]],
    saved_weight: Callable[[str], Tensor | None],
) -> None:
    formats, steps = state.scalars["formats"], state.scalars["state"]
    for parameter in [parameter for group in optimizer.param_groups for parameter in group["params"]]:
        name = names[parameter]
        if name not in steps:
            continue  # it never had a gradient
        dtype = getattr(torch, formats["weights"][name])
        is_finer = dtype == torch.float32 and parameter.dtype != dtype
        weight = saved_weight(name) if is_finer else None
        first, num_elements = first_element(parameter), local_part(parameter).numel()
        values = {key: state.tensors[f"{name}.{key}"] for key in keys.get(name, [])}
        kept_as = formats["state"]
        try:
            if is_sharded(parameter) or any(isinstance(value, StateParts) for value in values.values()):
                averages = optimizer.averages_of(parameter)
                values, kept_as = state_here(values, averages, kept_as, first, first + num_elements)
            saved = SavedState(
                values=values | steps[name],
                state=kept_as,
                master=formats["master"],
                dtype=dtype,
                weight=None if weight is None else weight.reshape(-1)[first : first + num_elements],
            )
            take_state(optimizer, parameter, saved)
        except KeyError as error:
            raise CheckpointError(
                f"The optimizer state has no {name}.{error.args[0]}, which its formats (state {formats['state']}, "
                f"master {formats['master']}) need: the checkpoint is damaged. Resume from another one."
            ) from error


def _export_formats(optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, Any]:
    if not isinstance(optimizer, ChunkedOptimizer):
        return {}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {
        "formats": {
            "state": optimizer.state_format,
            "master": optimizer.master_format,
            "weights": {names[p]: str(p.dtype).removeprefix("torch.") for p in parameters},
        }
    }


def _kind(optimizer: Optimizer) -> str:
    """Return package and class, such as ``torch.AdamW``; the modules in between change with versions."""
    if isinstance(optimizer, ChunkedOptimizer):
        return f"lowmem_ft.{type(optimizer.rule).__name__}"
    return f"{type(optimizer).__module__.partition('.')[0]}.{type(optimizer).__name__}"


def _export_group(group: Mapping[str, Any], names: Mapping[Tensor, str]) -> dict[str, Any]:
    return {
        "hyperparameters": {k: v for k, v in group.items() if k != "params" and k not in _KERNEL_CHOICES},
        "shapes": {names[parameter]: list(parameter.shape) for parameter in group["params"]},
    }


def _differences(optimizer: Optimizer, names: Mapping[Tensor, str], scalars: Mapping[str, Any]) -> list[str]:
    """Return what keeps this state from fitting this optimizer, one sentence each."""
    if scalars["optimizer"] != _kind(optimizer):
        return [
            f"The optimizer state was written by {scalars['optimizer']}, this run uses {_kind(optimizer)}. Set "
            "optimizer.name to that one, or start a new run from the saved weights."
        ]
    saved = [group["shapes"] for group in scalars["groups"]]
    own = [_export_group(group, names)["shapes"] for group in optimizer.param_groups]
    if saved == own:
        return []
    saved_shapes = {name: shape for group in saved for name, shape in group.items()}
    own_shapes = {name: shape for group in own for name, shape in group.items()}
    problems = [
        f"The optimizer state holds {name}, which this run does not train."
        for name in saved_shapes.keys() - own_shapes.keys()
    ] + [
        f"The optimizer state has nothing for {name}, which this run trains."
        for name in own_shapes.keys() - saved_shapes.keys()
    ]
    problems += [
        f"The optimizer state has {name} of shape {saved_shapes[name]}, but in this run its shape is "
        f"{own_shapes[name]}."
        for name in saved_shapes.keys() & own_shapes.keys()
        if saved_shapes[name] != own_shapes[name]
    ]
    return sorted(problems) or [
        ("The optimizer state has the same parameters in different groups from this run.")
    ]


def _keys_by_parameter(full_names: Iterable[str]) -> dict[str, list[str]]:
    """Return the state keys for which each parameter has a tensor."""
    keys: dict[str, list[str]] = {}
    for full_name in full_names:
        name, _, key = full_name.rpartition(".")
        keys.setdefault(name, []).append(key)
    return keys


def _fill(name: str, allocated: Mapping[str, Any], saved: Mapping[str, Tensor]) -> None:
    """Copy saved tensors into those that an optimizer allocated."""
    for key, tensor in saved.items():
        target = allocated.get(key)
        if target is None or target.dtype != tensor.dtype or target.shape != tensor.shape:
            kept = "nothing" if target is None else f"{target.dtype} of shape {list(target.shape)}"
            raise CheckpointError(
                f"The optimizer state has {name}.{key} as {tensor.dtype} of shape {list(tensor.shape)}, but this "
                f"optimizer keeps {kept}. Set optimizer.name to the one that wrote it."
            )
        target.copy_(tensor)


def _place(
    saved: Mapping[str, Tensor], parameter: nn.Parameter, group: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Copy saved tensors to where torch's optimizers keep them, in the types that they were saved in."""
    step_on_device = group.get("fused") or group.get("capturable")
    return {
        key: tensor.to("cpu" if key == "step" and not step_on_device else parameter.device, copy=True)
        for key, tensor in saved.items()
    }
