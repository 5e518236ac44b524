"""The optimizer of a run and its hyperparameters; its row is in ``table.py``."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lowmem_ft.foundation.knob import Effect, as_typed, knob
from lowmem_ft.foundation.memory.least_memory import NOTHING, Held, StepFacts, as_it_is, gone_unless
from lowmem_ft.foundation.packages import require_package
from lowmem_ft.foundation.wsl import is_wsl
from lowmem_ft.optimizers.table import (
    DEFAULT_OPTIMIZER,
    MASTER_BYTES,
    OPTIMIZERS,
    Capability,
    MasterName,
    OptimizerName,
    OptimizerRow,
    StateFormats,
    StateName,
    listed,
    optimizers_that,
)

_ROUNDED = Effect(cost="time", fidelity="unbiased rounding")
_EFFECTS_OF_STATE = {"bf16": _ROUNDED, "8bit": _ROUNDED}


class _EffectsOfRows(Mapping[OptimizerName, Effect]):
    """Effects of the optimizers, read from their rows on demand."""

    def __getitem__(self, name: OptimizerName) -> Effect:
        return OPTIMIZERS[name].effect

    def __iter__(self) -> Iterator[OptimizerName]:
        return iter(OPTIMIZERS)

    def __len__(self) -> int:
        return len(OPTIMIZERS)


class _EffectsOfState(Mapping[Any, Effect]):
    """Effects of the state's formats; several together have the effect of those that round."""

    def __getitem__(self, state: StateFormats) -> Effect:
        names = [state] if isinstance(state, str) else state.values()
        found = [_EFFECTS_OF_STATE[name] for name in names if name in _EFFECTS_OF_STATE]
        if not found:
            raise KeyError(state)
        return found[0]

    def __iter__(self) -> Iterator[str]:
        return iter(_EFFECTS_OF_STATE)

    def __len__(self) -> int:
        return len(_EFFECTS_OF_STATE)


def _state_on_device(held: Held, name: OptimizerName, step: StepFacts) -> Held:
    form = OPTIMIZERS[name].bitsandbytes
    return NOTHING if form is not None and form.paged else held


def _gradients_that_wait(held: Held, in_backward: bool, step: StepFacts) -> Held:
    """Leave all gradients of a step in backward that clips them: they wait for their norm."""
    return held if not in_backward or step.clips else NOTHING


_SMALLEST_FLOAT32 = 2.0**-126
"""The smallest float32 with full precision; GPUs take less for 0."""


def _freed_state() -> str:
    """Return the bytes of state per parameter that each optimizer saves, from the fewest."""
    most = OPTIMIZERS[DEFAULT_OPTIMIZER].state_bytes()
    freed = {name: round(most - row.state_bytes()) for name, row in OPTIMIZERS.items()}
    spared = _by_value({name: num_bytes for name, num_bytes in freed.items() if num_bytes})
    of_each = "; ".join(f"{num_bytes} with {names}" for num_bytes, names in sorted(spared.items()))
    return f"of {DEFAULT_OPTIMIZER}'s {most:g} bytes of state a parameter: {of_each}"


def _values_of(hyperparameter: str) -> str:
    """Return the meaning of null, and of 0 if it leaves no state; bitsandbytes' optimizers equal ours in both."""
    takers = _takers(hyperparameter)
    defaults = _by_value({name: row.hyperparameters[hyperparameter] for name, row in takers.items()})
    clauses = [f"null: {'; '.join(f'{_typed(default)} for {names}' for default, names in defaults.items())}"]
    stateless = tuple(name for name, row in takers.items() if row.stateless_at_zero == hyperparameter)
    if stateless:
        clauses.append(f"0: no state with {listed(stateless, 'and')}")
    return "; ".join(clauses)


def _averages_by_optimizer() -> str:
    """Return the names of the running averages that each optimizer keeps in a format of choice."""
    rows = {name: row for name, row in OPTIMIZERS.items() if row.takes_state_formats}
    return "; ".join(f"{name}: {listed(row.averages, 'and')}" for name, row in rows.items())


def _takers(hyperparameter: str) -> dict[str, OptimizerRow]:
    rows = OPTIMIZERS.items()
    return {name: row for name, row in rows if row.rule is not None and hyperparameter in row.hyperparameters}


def _by_value(values: Mapping[str, Hashable]) -> dict[Any, str]:
    """Group names by value, and list the names of each group in words."""
    names: dict[Hashable, tuple[str, ...]] = defaultdict(tuple)
    for name, value in values.items():
        names[value] += (name,)
    return {value: listed(alike, "and") for value, alike in names.items()}


def _typed(value: Any) -> str:
    return ", ".join(map(_typed, value)) if isinstance(value, tuple) else f"{value:g}"


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer by name and its hyperparameters; the learning rate is ``training.learning_rate``.

    A hyperparameter left at null takes the optimizer's own default; one that it does not have is rejected.
    """

    name: OptimizerName = knob(
        DEFAULT_OPTIMIZER,
        "Optimizer; 8bit and 32bit ones are from bitsandbytes, paged ones spill to host memory (CUDA only).",
        frees=_freed_state(),
        costs=(
            "8bit: state rounded to 256 levels; every optimizer except AdamW: other mathematics and learning rates"
        ),
        effects=_EffectsOfRows(),
        remaining_bytes={"state": _state_on_device},
    )
    betas: tuple[float, float] | None = knob(None, f"Decay of the running averages; {_values_of('betas')}.")
    eps: float | None = knob(None, f"Term that prevents division by zero; {_values_of('eps')}.")
    momentum: float | None = knob(None, f"Decay of the momentum; {_values_of('momentum')}.")
    state: StateName | dict[str, StateName] = knob(
        "fp32",
        f"How {listed(optimizers_that('takes_state_formats'), 'and')} keep their running averages; a mapping such as "
        "{exp_avg: bf16, exp_avg_sq: fp32} sets each by its name, and averages that it does not name are in fp32 "
        f"({_averages_by_optimizer()}).",
        frees="8bit: 6 of AdamW's 8 bytes a parameter; bf16: 4; for only one of its two averages, half of that",
        costs="values rounded at random, without bias, by up to 1/8 of their size (8bit) or 1/128 (bf16)",
        effects=_EffectsOfState(),
        search_values=("fp32", "bf16", "8bit"),
        remaining_bytes={"state": as_it_is},
    )
    master: MasterName = knob(
        "fp32",
        "What is kept in addition to bfloat16 weights, so that small updates are not lost; split16 and fp32 are "
        "exact.",
        frees="4 bytes a parameter next to a bfloat16 weight become 2 (split16), 1 (split24) or 0 (the others)",
        costs="split24: 24 of 32 bits, without bias; stochastic_rounding: noise; none: small updates are lost",
        effects={
            "split16": Effect(),
            "split24": _ROUNDED,
            "stochastic_rounding": dataclasses.replace(_ROUNDED, consent="stochastic_rounding"),
            "none": Effect(fidelity="other mathematics", consent="plain_bf16"),
        },
        search_values=("fp32", "split16", "split24", "stochastic_rounding", "none"),
        remaining_bytes={"state": as_it_is},
    )
    in_backward: bool = knob(
        False,
        "Update each weight as soon as backward has finished its gradient; with clipping, keep gradients compactly "
        "until their norm is known.",
        frees=(
            "the gradients except for those of one layer (without clipping), or all of them with offload to the host"
        ),
        costs="smaller kernels inside backward; with clipping and state on the host, gradients cross PCIe twice a step",
        effects={True: Effect(cost="time", engines=("fsdp2",), traits=("updates in backward",))},
        search_values=(False, True),
        remaining_bytes={"gradients": _gradients_that_wait, "sums": gone_unless(False)},
    )
    weight_decay: float = knob(
        0.0, "Decoupled weight decay (sgd: L2 penalty), not applied to biases and norms."
    )

    @property
    def row(self) -> OptimizerRow:
        """The optimizer's row in the table."""
        return OPTIMIZERS[self.name]

    @property
    def state_bytes(self) -> float:
        """Bytes of running averages for each element of a weight."""
        return self.row.state_bytes(self.state) if self.stateless_by is None else 0

    def bytes_with(self, weight_itemsize: int) -> float:
        """Return the bytes of running averages and master tensors for each element of a weight of this item size."""
        has_master = self.row.takes_formats and weight_itemsize < 4
        return self.state_bytes + (MASTER_BYTES[self.master] if has_master else 0)

    @property
    def stateless_by(self) -> str | None:
        """The hyperparameter whose value 0 leaves the optimizer without running averages; None: it keeps them."""
        name = self.row.stateless_at_zero
        return name if name is not None and self.hyperparameters()[name] == 0 else None

    def hyperparameters(self) -> dict[str, Any]:
        """Return the optimizer's arguments except rate and decay: the values set here over its own defaults."""
        return {
            name: default if getattr(self, name) is None else getattr(self, name)
            for name, default in self.row.hyperparameters.items()
        }

    def problems(self) -> Iterator[str]:
        """Yield the rules that these values break on any device: not taken by the optimizer, or out of range."""
        yield from _unused(self)
        yield from _beyond_its_capabilities(self)
        yield from _format_of_nothing(self)
        yield from _format_of_unknown(self)
        yield from _out_of_range(self)

    def problems_on(self, device_type: str, kernels: str) -> Iterator[str]:
        """Yield the rules that the optimizer breaks on a device.

        Args:
            device_type: torch's name for it.
            kernels: the device type whose kernels it runs: another one if the device is virtual.
        """
        if self.row.devices is not None and kernels not in self.row.devices:
            yield (
                f"optimizer.name={self.name} runs on {', '.join(self.row.devices)}, got device {device_type}. "
                f"Set optimizer.name={self.row.elsewhere}."
            )
        elif device_type == "cuda" and is_wsl():
            yield from self.problems_on_wsl()

    def problems_on_wsl(self) -> Iterator[str]:
        """Yield the rules that the optimizer breaks on a GPU under WSL: no state that would spill to the host."""
        if self.row.bitsandbytes is not None and self.row.bitsandbytes.paged:
            yield (
                f"optimizer.name={self.name} lets state spill to host memory, which CUDA on WSL cannot: its managed "
                f"memory is never larger than the GPU's. Set optimizer.name={self.row.elsewhere}, or "
                f"optimizer.name={self.row.stand_in} and offload.optimizer=host."
            )

    def require_packages(self) -> None:
        """Reject an optimizer of bitsandbytes if the package is not installed.

        Raises:
            MissingPackageError: if it is not installed.
        """
        if self.row.bitsandbytes is not None:
            require_package(f"optimizer.name={self.name}", "bitsandbytes", "bitsandbytes")


def _unused(config: OptimizerConfig) -> Iterator[str]:
    for name in dict.fromkeys(name for row in OPTIMIZERS.values() for name in row.hyperparameters):
        assert hasattr(config, name), (
            f"a row of optimizers/table.py takes {name}: give OptimizerConfig a field for it"
        )
        value = getattr(config, name)
        if value is not None and name not in config.row.hyperparameters:
            takes_it = next(other for other, row in OPTIMIZERS.items() if name in row.hyperparameters)
            yield (
                f"optimizer.{name} does not exist for optimizer.name={config.name}, got "
                f"{list(value) if isinstance(value, tuple) else value}. Remove it or set optimizer.name={takes_it}."
            )


def _beyond_its_capabilities(config: OptimizerConfig) -> Iterator[str]:
    asked: tuple[tuple[str, str, str, Capability], ...] = (
        ("state", as_typed(config.state), "fp32", "takes_state_formats"),
        ("master", config.master, "fp32", "takes_formats"),
        ("in_backward", str(config.in_backward).lower(), "false", "steps_in_backward"),
    )
    for field, value, default, capability in asked:
        if value != default and not getattr(config.row, capability):
            yield (
                f"optimizer.{field}={value} needs optimizer.name={'|'.join(optimizers_that(capability))}, got "
                f"{config.name}. Set optimizer.name={config.row.stand_in or DEFAULT_OPTIMIZER} or "
                f"optimizer.{field}={default}."
            )


def _format_of_nothing(config: OptimizerConfig) -> Iterator[str]:
    name = config.stateless_by
    if config.state != "fp32" and config.row.takes_state_formats and name is not None:
        yield (
            f"optimizer.state={as_typed(config.state)} is a format of running averages, and optimizer.{name}=0 keeps "
            f"none. Set optimizer.state=fp32 or optimizer.{name}={config.row.hyperparameters[name]}."
        )


def _format_of_unknown(config: OptimizerConfig) -> Iterator[str]:
    own = config.row.averages
    unknown = [] if isinstance(config.state, str) else [name for name in config.state if name not in own]
    if unknown and config.row.takes_state_formats:
        yield (
            f"optimizer.state names running averages of optimizer.name={config.name}, which has {listed(own, 'and')}; "
            f"got {', '.join(unknown)}. Set optimizer.state.{own[0]}, or one format for all."
        )


def _out_of_range(config: OptimizerConfig) -> Iterator[str]:
    if config.betas is not None and not all(0 <= beta < 1 for beta in config.betas):
        yield f"optimizer.betas are two numbers from 0 to below 1, got {list(config.betas)}. Try [0.9, 0.999]."
    if config.momentum is not None and not 0 <= config.momentum < 1:
        yield f"optimizer.momentum is from 0 to below 1, got {config.momentum}. Try 0.9."
    if config.eps is not None and not (config.eps >= _SMALLEST_FLOAT32 and math.isfinite(config.eps)):
        yield (
            f"optimizer.eps is finite and at least {_SMALLEST_FLOAT32:.3g}, got {config.eps}: updates are computed in "
            "float32, which has 0 for less. Try 1e-8."
        )
    if not (config.weight_decay >= 0 and math.isfinite(config.weight_decay)):
        yield f"optimizer.weight_decay is finite and 0 or more, got {config.weight_decay}. Try 0.01."
