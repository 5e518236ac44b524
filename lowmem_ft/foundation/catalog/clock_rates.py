"""Shares of a GPU's published rates that programs reach, by architecture: data of ``clock_rates.json``.

The first entry holds the defaults. Each later entry overrides some of them for a compute capability or for the GPUs
that it names; the last entry that applies wins. Every number has its source.

The host's numbers describe the machine on which an entry's runs were timed, not the GPU, and not the machine that a
reader will rent: the published B200 runs had a host that issues operators three times as fast as that of the L40S runs.
Estimates therefore assume the same host for all GPUs (:func:`reference_host`); only predictions of timed runs use each
entry's own host.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ClockRates:
    """The shares and seconds that a GPU and its host reach.

    Args:
        products: share of the dense peak that large matrix products of 16 bits, or in TF32, reach.
        float32_products: that of products in float32, by other units.
        float8_products: that of products in float8.
        inner_dimension: inner dimension that takes as long as the beginning and the end of a tile of a product.
        attention: share of the dense peak that fused attention kernels reach with many keys and heads of 128.
        attention_keys: keys with which a query reaches half of it.
        attention_backward: the backward pass's share, as a share of that one.
        backward_keys: keys with which a query reaches half of the backward pass's.
        small_heads: what smaller heads reach of both.
        bandwidth: share of the memory's bandwidth that element-wise kernels reach.
        traffic: what other kinds of kernels reach of that (``virtual_gpu/calls/kernel_kinds.py``).
        host_link: share of the host link's rate after line coding that copies from pinned memory reach.
        operator_seconds: seconds on the host for an operator in eager mode: Python, dispatcher, autograd and launch.
        launch_seconds: seconds on the host for each further kernel of an operator.
        triton_launch: operators that keep the host as long as what a Triton kernel's launch takes longer than an
            operator.
        seconds_share: relative distance of a run's seconds from the clock's, either way, of a run whose kinds of work
            are those of the runs behind the numbers.
        known_kinds: kinds of kernels of which others timed enough on this architecture to know their rate.
        measured_shares: for each kind of work, the largest share of the seconds that it had in a run behind this range.
        num_rows: published training runs behind the numbers that are fitted; 0: the numbers are microbenchmarks'.
        is_host_measured: whether the host's numbers were measured on the machine that the estimate is for.
    """

    products: float
    float32_products: float
    float8_products: float
    inner_dimension: float
    attention: float
    attention_keys: float
    attention_backward: float
    backward_keys: float
    small_heads: float
    bandwidth: float
    host_link: float
    operator_seconds: float
    launch_seconds: float
    triton_launch: float
    seconds_share: float
    traffic: Mapping[str, float] = field(default_factory=dict, hash=False)
    known_kinds: tuple[str, ...] = ()
    measured_shares: Mapping[str, float] = field(default_factory=dict, hash=False)
    num_rows: int = 0
    is_host_measured: bool = False

    @property
    def host_range(self) -> tuple[float, float]:
        """The least and the most that the host may take, as shares of its seconds here."""
        return MEASURED_HOST_RANGE if self.is_host_measured else host_range()

    def share_with(self, shares: Mapping[str, float]) -> float:
        """Return the relative distance of a step's seconds from the clock's, either way.

        What a step has more of a kind of work than any run behind the numbers may be off by as much as kernels of that
        kind are. Kinds whose numbers rest on each other are off together, the others independently of each other.

        Args:
            shares: shares of the step's seconds by kind of work.
        """
        errors: dict[str, float] = {}
        for kind, share in shares.items():
            more = max(0.0, share - self.measured_shares.get(kind, 0.0))
            distance = KNOWN_SHARE if kind in self.known_kinds else UNKNOWN_SHARE
            family = _FAMILIES.get(kind, "element-wise")
            errors[family] = errors.get(family, 0.0) + more * math.log1p(distance)
        return math.expm1(math.hypot(math.log1p(self.seconds_share), *errors.values()))

    def unlike_measured(self, shares: Mapping[str, float]) -> tuple[str, ...]:
        """Return the kinds of work whose rate is not known and of which a step has more than any run behind its range.

        Args:
            shares: shares of the step's seconds by kind of work.
        """
        if not self.num_rows:
            return ()
        return tuple(
            kind
            for kind, share in shares.items()
            if kind not in self.known_kinds and share > self.measured_shares.get(kind, 0.0) + _AS_MUCH
        )


KNOWN_SHARE, UNKNOWN_SHARE = 0.15, 0.5
"""Distances of kernels' seconds from the clock's, of a known kind and of others, in the mean of a publisher that
is left out: about 85 of a hundred are off by no more (``scripts/clock_kernels.py``)."""

_FAMILIES = {
    "products": "products",
    "attention": "attention",
    "attention backward": "attention",
    "fused kernels": "fused kernels",
    "fused backward kernels": "fused kernels",
    "cross entropy": "fused kernels",
    "host copies": "host copies",
    "communication": "communication",
}
"""The number that a kind rests on; others rest on the share of the bandwidth that element-wise kernels reach."""

_AS_MUCH = 0.1
"""Share of a step by which it may have more of a kind of work than a timed run, and is still like it."""

NUMBERS = tuple(each.name for each in dataclasses.fields(ClockRates) if each.name != "is_host_measured")

MEASURED_HOST_RANGE = (1 / 1.15, 1.25)
"""The least and the most that a measured host may take, as shares of what was measured.

A step's operators are not all alike: for nine kinds of layers, counts times measured costs are -20 to +16% off the
host's own time (``scripts/calibrate counts``, Intel Xeon, torch 2.13, 2026-11-30).
"""

HOST_NUMBERS = ("operator_seconds", "launch_seconds", "triton_launch")
"""The numbers that belong to the host."""


def clock_rates(
    gpu: str = "",
    compute_capability: tuple[int, int] | None = None,
    entries: Sequence[Mapping[str, Any]] | None = None,
) -> ClockRates:
    """Return the rates of a GPU in the machine that its numbers are from.

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
            traffic = {**numbers.get("traffic", {}), **entry.get("traffic", {})}  # by kind
            numbers.update({name: entry[name] for name in NUMBERS if name in entry}, traffic=traffic)
    numbers["known_kinds"] = tuple(numbers.get("known_kinds", ()))
    return ClockRates(**numbers)


def rates_of_estimates(gpu: str = "", compute_capability: tuple[int, int] | None = None) -> ClockRates:
    """Return the rates of a GPU in a machine with the reference host; arguments as for :func:`clock_rates`."""
    return dataclasses.replace(clock_rates(gpu, compute_capability), **reference_host())


def reference_host(entries: Sequence[Mapping[str, Any]] | None = None) -> dict[str, float]:
    """Return the numbers of the host that estimates assume: the median of the known hosts.

    A host is known if its numbers come from the microbenchmarks (the default entry) or if its entry was fitted to timed
    runs and sets ``operator_seconds``: runs whose kernels outlast their launches reveal nothing about their host. Each
    counts once, however many rows its publisher timed, since those are of one machine. The middle one, and no mean, is
    taken whole: how long an operator and a launch take were fitted to the same runs.

    Args:
        entries: as for :func:`clock_rates`.
    """
    hosts = _known_hosts(entries)
    middle = statistics.median_low(host["operator_seconds"] for host in hosts)
    host = next(host for host in hosts if host["operator_seconds"] == middle)
    return {name: host[name] for name in HOST_NUMBERS}


def host_range(entries: Sequence[Mapping[str, Any]] | None = None) -> tuple[float, float]:
    """Return the seconds of the fastest and the slowest known host, as shares of the reference host's.

    Args:
        entries: as for :func:`clock_rates`.
    """
    seconds = [host["operator_seconds"] for host in _known_hosts(entries)]
    assumed = reference_host(entries)["operator_seconds"]
    return min(seconds) / assumed, max(seconds) / assumed


def _known_hosts(entries: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    default, *others = rate_entries() if entries is None else entries
    return [dict(default), *({**default, **entry} for entry in others if _is_fitted_host(entry))]


def _is_fitted_host(entry: Mapping[str, Any]) -> bool:
    return bool(entry.get("fitted")) and "operator_seconds" in entry


@functools.cache
def rate_entries() -> tuple[dict[str, Any], ...]:
    """Return the entries of the file, the default first."""
    file = resources.files("lowmem_ft.foundation.catalog") / "clock_rates.json"
    return tuple(json.loads(file.read_text(encoding="utf-8")))


def _is_default(entry: Mapping[str, Any]) -> bool:
    return "gpus" not in entry and "compute_capability" not in entry
