"""What the documentation of recipe keys says about single optimizers, put together from their rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from typing import Any

from lowmem_ft.optimizers.table import DEFAULT_OPTIMIZER, OPTIMIZERS, OptimizerRow, listed


def freed_state() -> str:
    """Bytes of state a parameter that each optimizer spares, from the fewest."""
    most = OPTIMIZERS[DEFAULT_OPTIMIZER].state_bytes()
    freed = {name: round(most - row.state_bytes()) for name, row in OPTIMIZERS.items()}
    spared = _by_value({name: num_bytes for name, num_bytes in freed.items() if num_bytes})
    of_each = "; ".join(f"{num_bytes} with {names}" for num_bytes, names in sorted(spared.items()))
    return f"of {DEFAULT_OPTIMIZER}'s {most:g} bytes of state a parameter: {of_each}"


def defaults_of(hyperparameter: str) -> str:
    """What null stands for; bitsandbytes' optimizers have the defaults of ours."""
    defaults = {name: row.hyperparameters[hyperparameter] for name, row in _takers(hyperparameter).items()}
    of_each = (f"{_typed(default)} for {names}" for default, names in _by_value(defaults).items())
    return f"null: {'; '.join(of_each)}"


def stateless_at_zero_of(hyperparameter: str) -> str:
    """Which optimizers keep no state where it is 0."""
    takers = _takers(hyperparameter).items()
    names = tuple(name for name, row in takers if row.stateless_at_zero == hyperparameter)
    return f"at 0 {listed(names, 'and')} {'keep' if len(names) > 1 else 'keeps'} no state"


def _takers(hyperparameter: str) -> dict[str, OptimizerRow]:
    rows = OPTIMIZERS.items()
    return {name: row for name, row in rows if row.rule is not None and hyperparameter in row.hyperparameters}


def _by_value(values: Mapping[str, Hashable]) -> dict[Any, str]:
    """The names of those that share a value, as a sentence lists them."""
    names: dict[Hashable, tuple[str, ...]] = defaultdict(tuple)
    for name, value in values.items():
        names[value] += (name,)
    return {value: listed(alike, "and") for value, alike in names.items()}


def _typed(value: Any) -> str:
    return ", ".join(map(_typed, value)) if isinstance(value, tuple) else f"{value:g}"
