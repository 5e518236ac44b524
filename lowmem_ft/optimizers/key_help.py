"""Help on recipe keys that depends on single optimizers, built from their rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from typing import Any

from lowmem_ft.optimizers.table import DEFAULT_OPTIMIZER, OPTIMIZERS, OptimizerRow, listed


def freed_state() -> str:
    """Return the bytes of state per parameter that each optimizer saves, from the fewest."""
    most = OPTIMIZERS[DEFAULT_OPTIMIZER].state_bytes()
    freed = {name: round(most - row.state_bytes()) for name, row in OPTIMIZERS.items()}
    spared = _by_value({name: num_bytes for name, num_bytes in freed.items() if num_bytes})
    of_each = "; ".join(f"{num_bytes} with {names}" for num_bytes, names in sorted(spared.items()))
    return f"of {DEFAULT_OPTIMIZER}'s {most:g} bytes of state a parameter: {of_each}"


def values_of(hyperparameter: str) -> str:
    """Return the meaning of null, and of 0 if it leaves no state; bitsandbytes' optimizers equal ours in both."""
    takers = _takers(hyperparameter)
    defaults = _by_value({name: row.hyperparameters[hyperparameter] for name, row in takers.items()})
    clauses = [f"null: {'; '.join(f'{_typed(default)} for {names}' for default, names in defaults.items())}"]
    stateless = tuple(name for name, row in takers.items() if row.stateless_at_zero == hyperparameter)
    if stateless:
        clauses.append(f"0: no state with {listed(stateless, 'and')}")
    return "; ".join(clauses)


def averages_by_optimizer() -> str:
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
