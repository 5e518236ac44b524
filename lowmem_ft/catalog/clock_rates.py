"""Shares of a GPU's published rates that programs reach, by architecture: data of ``clock_rates.json``.

Each entry has the numbers that differ from those before it, with the source of each; the first is the default, others
hold for a compute capability or for the GPUs that they name, and the last that applies wins.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ClockRates:
    """The shares and seconds that a GPU and its host reach.

    Args:
        products: share of the dense peak that matrix products reach.
        attention: share of the dense peak that fused attention kernels reach.
        bandwidth: share of the memory's bandwidth that other kernels reach.
        host_link: share of the host link's rate after line coding that copies from pinned memory reach.
        operator_seconds: seconds on the host for an operator in eager mode: Python, dispatcher, autograd and launch.
        launch_seconds: seconds on the host for each further kernel of an operator.
        triton_launch: operators that keep the host as long as what a Triton kernel's launch takes longer than an
            operator.
        seconds_share: relative distance of a run's seconds from the clock's, either way.
        num_rows: published training runs behind the numbers that are fitted; 0: the numbers are microbenchmarks'.
    """

    products: float
    attention: float
    bandwidth: float
    host_link: float
    operator_seconds: float
    launch_seconds: float
    triton_launch: float
    seconds_share: float
    num_rows: int = 0


NUMBERS = tuple(field.name for field in dataclasses.fields(ClockRates))


def clock_rates(
    gpu: str = "",
    compute_capability: tuple[int, int] | None = None,
    entries: Sequence[Mapping[str, Any]] | None = None,
) -> ClockRates:
    """Return the rates of a GPU.

    Args:
        gpu: its name in the catalogue.
        compute_capability: its architecture; without both, the default comes back.
        entries: what to read instead of the file.
    """
    architecture = "" if compute_capability is None else "{}.{}".format(*compute_capability)
    numbers: dict[str, Any] = {}
    for entry in rate_entries() if entries is None else entries:
        if (
            _is_default(entry)
            or gpu in entry.get("gpus", ())
            or entry.get("compute_capability") == architecture
        ):
            numbers.update({name: entry[name] for name in NUMBERS if name in entry})
    return ClockRates(**numbers)


@functools.cache
def rate_entries() -> tuple[dict[str, Any], ...]:
    """Return the entries of the file, the default first."""
    file = resources.files("lowmem_ft.catalog") / "clock_rates.json"
    return tuple(json.loads(file.read_text(encoding="utf-8")))


def _is_default(entry: Mapping[str, Any]) -> bool:
    return "gpus" not in entry and "compute_capability" not in entry
