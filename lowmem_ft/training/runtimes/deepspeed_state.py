"""The state of DeepSpeed's engine, converted to and from the format of lowmem_ft's own AdamW.

The engine concatenates all parameters and shards the result over the processes. This module converts it back to single
parameters, so that a checkpoint is that of one process: any number of processes can resume from it, with or without
DeepSpeed, and the engine can resume from theirs. DeepSpeed's own checkpoints are pickles, tied to the number of
processes that wrote them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowmem_ft.foundation.tensors.local_shards import is_partitioned, set_whole, whole_tensor
from lowmem_ft.optimizers import (
    ChunkedOptimizer,
    OptimizerConfig,
    OptimizerState,
    export_optimizer_state,
    import_optimizer_state,
)

MASTER = "master"


class EngineState:
    """AdamW's state and the float32 weights, one whole parameter at a time; every process calls each method.

    Args:
        model: a model whose parameters are not sharded yet.
        optimizer: AdamW over the trained parameters, which the engine is going to wrap.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        names = {parameter: name for name, parameter in model.named_parameters()}
        self._groups = optimizer.param_groups
        self._parameters = [
            {names[parameter]: parameter for parameter in group["params"]} for group in self._groups
        ]
        self._stand_ins = [
            {name: nn.Parameter(torch.empty_like(p, device="meta")) for name, p in named.items()}
            for named in self._parameters
        ]
        self._optimizer: Any = None

    def of(self, optimizer: Any) -> None:
        """Set the engine's optimizer, which wraps the original one."""
        self._optimizer = optimizer

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each of the state's tensors, gathered to the host, by its name in :class:`OptimizerState`."""
        if not self._num_steps():
            return
        self._link()
        twin = self._twin(self._stand_ins)
        for parameters, stand_ins in zip(self._parameters, self._stand_ins, strict=True):
            for name, parameter in parameters.items():
                for key in twin.kept_sizes(stand_ins[name]):
                    yield f"{name}.{key}", self._gathered(parameter, key).flatten().cpu()

    def scalars(self) -> dict[str, Any]:
        """Return the values of the state that are not tensors."""
        twin = self._twin(self._stand_ins)
        if num_steps := self._num_steps():
            for stand_in in _all(self._stand_ins).values():
                twin.state[stand_in] = {"step": num_steps}
        return export_optimizer_state(twin, _all(self._stand_ins).items()).scalars

    def load(self, saved: OptimizerState, saved_weight: Callable[[str], Tensor | None]) -> None:
        """Load the state of an AdamW in any format; see :func:`lowmem_ft.optimizers.import_optimizer_state`.

        The parameters already hold the saved weights.

        Raises:
            CheckpointError: if the state is that of another optimizer or of other parameters.
        """
        steps = saved.scalars["state"]
        twin = self._twin(self._stand_ins)
        nothing = OptimizerState(tensors={}, scalars={**saved.scalars, "state": {}})
        import_optimizer_state(twin, _all(self._stand_ins).items(), nothing)
        for group, own in zip(self._groups, twin.param_groups, strict=True):
            group.update({key: value for key, value in own.items() if key in group and key != "params"})
        self._allocate(max((step["step"] for step in steps.values()), default=0))
        for index, parameters in enumerate(self._parameters):
            for name, parameter in parameters.items():
                weight = nn.Parameter(whole_tensor(parameter).detach().to("cpu", copy=True))
                single: list[dict[str, nn.Parameter]] = [{} for _ in self._groups]
                single[index] = {name: weight}
                one = self._twin(single)
                import_optimizer_state(one, [(name, weight)], _only(saved, name), saved_weight)
                set_whole(parameter, weight)
                state = one.state.get(weight, {})
                self._put(parameter, MASTER, state.get(MASTER, weight.detach().float()))
                for key in state.keys() - {MASTER, "step"}:
                    self._put(parameter, key, state[key])

    def _twin(self, named: list[dict[str, nn.Parameter]]) -> ChunkedOptimizer:
        """Return lowmem_ft's AdamW over some parameters in place of the engine's, in the same groups."""
        groups = [
            {**group, "params": list(parameters.values())}
            for group, parameters in zip(self._groups, named, strict=True)
            if parameters
        ]
        config = OptimizerConfig()
        defaults = {"lr": groups[0]["lr"], **config.hyperparameters()}
        kept = {*defaults, "initial_lr", "params"}
        groups = [{key: value for key, value in group.items() if key in kept} for group in groups]
        return ChunkedOptimizer(groups, config.row.update_rule(), defaults)

    def flat_parts(self) -> list[Tensor]:
        """Return this process's parts of the engine's flattened float32 weights, which AdamW updates."""
        name = "fp32_partitioned_groups_flat" if self._is_zero3() else "single_partition_of_fp32_groups"
        return getattr(self._optimizer, name)

    def _is_zero3(self) -> bool:
        return any(is_partitioned(parameter) for parameter in _all(self._parameters).values())

    def _num_steps(self) -> int:
        states = self._optimizer.optimizer.state.values()
        return max((int(state["step"]) for state in states if "step" in state), default=0)

    def _allocate(self, num_steps: int) -> None:
        """Allocate AdamW's state as it is after ``num_steps`` steps, with averages of zero."""
        inner = self._optimizer.optimizer
        inner.state.clear()
        for part in self.flat_parts() if num_steps else ():
            averages = {key: torch.zeros_like(part) for key in ("exp_avg", "exp_avg_sq")}
            inner.state[part] = {"step": torch.tensor(float(num_steps)), **averages}
        self._link()

    def _link(self) -> None:
        """Link each parameter to its averages for ZeRO-2, which looks for them once, before later groups have any."""
        parts, states = self.flat_parts(), self._optimizer.optimizer.state
        for parameter in () if self._is_zero3() else _all(self._parameters).values():
            place: Any = parameter._hp_mapping  # type: ignore[attr-defined]
            if place is not None:  # else this process holds no part of it
                part = parts[place.param_group_index]
                place.set_optim_state_fragment(part, states.get(part, {}))

    def _gathered(self, parameter: nn.Parameter, key: str) -> Tensor:
        utils = importlib.import_module("deepspeed.utils")
        if key == MASTER:
            return utils.safe_get_full_fp32_param(parameter)
        return utils.safe_get_full_optimizer_state(parameter, key)

    def _put(self, parameter: nn.Parameter, key: str, values: Tensor) -> None:
        utils: Any = importlib.import_module("deepspeed.utils")
        if not is_partitioned(parameter):
            whole = values.view(parameter.shape)
            if key == MASTER:
                utils.safe_set_full_fp32_param(parameter, whole)
            else:
                utils.safe_set_full_optimizer_state(parameter, whole, key)
            return
        partitioned: Any = parameter
        size = partitioned.ds_tensor.numel()
        first = size * torch.distributed.get_rank()
        part = values.new_zeros(size)  # the last process's part is padded
        here = values.flatten()[first : first + size]
        part[: here.numel()] = here
        if key == MASTER:
            utils.safe_set_local_fp32_param(parameter, part)
        else:
            utils.safe_set_local_optimizer_state(parameter, part, key)


def _all(named: list[dict[str, nn.Parameter]]) -> dict[str, nn.Parameter]:
    return {name: parameter for parameters in named for name, parameter in parameters.items()}


def _only(saved: OptimizerState, name: str) -> OptimizerState:
    """Return the saved state of one parameter."""
    scalars = saved.scalars
    groups = [
        {**group, "shapes": {name: group["shapes"][name]}}
        for group in scalars["groups"]
        if name in group["shapes"]
    ]
    tensors = {full: saved.tensors[full] for full in saved.tensors if full.rpartition(".")[0] == name}
    return OptimizerState(tensors=tensors, scalars={**scalars, "groups": groups})
