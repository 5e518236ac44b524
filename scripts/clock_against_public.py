"""Compare the clock with measured seconds, public ones and our own, and fit what microbenchmarks leave open.

    python scripts/clock_against_public.py [--traces FOLDER] [--fit]

The rows are ``tests/data/measured/seconds-public.json``; each says what runs on the virtual GPU in place of the program
that was measured. A row is traced once, with two depths, and kept in ``--traces``; all else takes a minute or two. The
runs of recipes in ``measured-cuda.json`` are rows too.

``--fit`` fits the share of the peak of products and of fused attention, the share of the bandwidth, the host's seconds
an operator, and how many operators a launch by Triton is, to the rows of each architecture that has at least four, and
writes them into ``lowmem_ft/foundation/catalog/clock_rates.json`` as an entry of their own; other architectures keep
the default's host. Rows of programs that run other kernels are left out of the fit, and so are those that are held out:
they were found when the clock was made. It minimises the squared relative errors, and adds the squared distance from
the microbenchmarks: a number is as likely one ``SPREAD`` away from its microbenchmark as a row is ``NOISE`` away from
the clock.

Every row is predicted with itself left out of the fit. The range of seconds is wider: what ``HELD`` of the rows do not
need more than where all rows of their *source* are left out, on the host that estimates assume, beyond what their kinds
of work and their host explain. A source is a publisher; where all rows of an architecture are one publisher's, it is a
day, which may be another machine. The table also has each row's range with its publisher left out of everything, as an
estimate would then print it: nothing is chosen by these. The results are kept next to the rows, in
``clocked-public.json``, and the table is written into ``docs/clock.md``.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import marked_table
import numpy as np
from command_line import parser_of
from measuring.constant_rows import caveat_of_the_clock
from measuring.public_seconds import ROWS, SecondsRow, TracedRecipe, TracedRow, load_rows, measured_rows
from numpy.typing import NDArray

from lowmem_ft.foundation.catalog.clock_rates import (
    ClockRates,
    clock_rates,
    host_range,
    rate_entries,
    reference_host,
)
from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.memory.memory_estimate import StepTime

ROOT = Path(__file__).resolve().parents[1]
RATES = ROOT / "lowmem_ft" / "foundation" / "catalog" / "clock_rates.json"
RESULTS = ROWS.with_name("clocked-public.json")
PAGE = ROOT / "docs" / "clock.md"

FEWEST_ROWS = 4
SPREAD = {"products": 0.1, "attention": 0.5, "bandwidth": 0.1, "operator_seconds": 0.5, "triton_launch": 0.7}
"""Distance, as a logarithm, by which a fitted number may well differ from its microbenchmark's. Attention has few
microbenchmarks by architecture, hosts differ, and so does the Python around a launch."""
LARGEST = {
    "products": 1.15,
    "attention": 1.0,
    "bandwidth": 0.95,
    "operator_seconds": 1.0,
    "triton_launch": 40.0,
}
NOISE = 0.1
"""Relative error of a row that is expected: repeats of one configuration on a T4 spread as far."""
STARTS = (1.0, 2.0, 3.0)
"""Hosts that the fit begins with, so much slower than the default: a row whose kernels all outlast their launches does
not tell that its host is slow."""
ROUNDS = 4
HELD = 0.85
"""Share of the rows that a range is to have inside: eight of ten unseen ones, and some as a margin."""
LEAST_SHARE = 0.15
"""The least range: one configuration took a T4 1.53 s with torch 2.10 and 1.76 s with 2.14, whose memory-efficient
attention is slower there (2.07 and 2.03 s without a fused kernel), and most rows of an architecture come from
one machine."""
LEAST_SLOPE = 0.1
"""A number is kept where one of its percents is at least a tenth of a percent of some row's seconds."""
BOARD_OF_ITS_OWN = ("t4", "l40")
"""GPUs whose rows say nothing about others with their compute capability: 70 W hold a T4's clock down, and an L40 has
half of an L40S's peak."""


AnyRow = TracedRow | TracedRecipe


@dataclass(frozen=True)
class Host:
    """The host that estimates assume.

    Args:
        numbers: its numbers.
        range: what the fastest and the slowest known host take, as shares of its seconds.
    """

    numbers: dict[str, float]
    range: tuple[float, float]

    @classmethod
    def of(cls, entries: Sequence[Mapping[str, Any]]) -> Host:
        """Return the host in the middle of those of some entries."""
        return cls(reference_host(entries), host_range(entries))


class Group:
    """The rows of one architecture, and the numbers that are fitted to them.

    Args:
        entry: how the entry of ``clock_rates.json`` names them.
        rows: the rows.
        gpu: the GPU whose rates are fitted; None: the first row's.

    Attributes:
        rows: those to fit to.
        others: those of programs that run other kernels, and those held out.
    """

    def __init__(self, entry: dict[str, Any], rows: Sequence[AnyRow], gpu: Gpu | None = None) -> None:
        self.entry = entry
        self.rows = [row for row in rows if row.row.is_fitted_to]
        self.others = [row for row in rows if not row.row.is_fitted_to]
        self.gpu = gpu or rows[0].gpu
        self.before = _without_fits(self.gpu.name, self.gpu.compute_capability)
        self._log_measured = np.log([row.row.seconds for row in self.rows])

    @property
    def title(self) -> str:
        """Its rows' GPUs."""
        return ", ".join(dict.fromkeys(row.row.gpu for row in self.rows))

    @property
    def is_fitted(self) -> bool:
        """True if there are enough rows."""
        return len(self.rows) >= FEWEST_ROWS

    def fitted(self) -> tuple[dict[str, float], list[float]]:
        """Return the numbers that the rows tell something about, and each row's prediction without itself.

        The predictions of the other rows come last.
        """
        steps = self._best_steps
        errors = self._errors(steps)
        slopes = self._slopes(steps, errors)
        everyone = np.arange(len(self.rows))
        predictions: list[float] = []
        for index, row in enumerate(self.rows):
            others = everyone[everyone != index]
            without = self._bounded(steps + self._improvement(errors[others], slopes[others], steps))
            predictions.append(self._seconds(row, self._with(without).rates))
        predictions += [self._seconds(row, self._with(steps).rates) for row in self.others]
        told = np.abs(slopes).max(axis=0) >= LEAST_SLOPE
        rates = self._with(steps).rates
        numbers = {
            name: float(f"{getattr(rates, name):.3g}")
            for name, is_told in zip(SPREAD, told, strict=True)
            if is_told
        }
        return numbers, predictions

    @functools.cached_property
    def _best_steps(self) -> NDArray[np.float64]:
        return min((self._descend(start) for start in STARTS), key=self._loss)

    def without(
        self, source: Callable[[SecondsRow], str], host: Host, *, ranged: bool = True
    ) -> dict[str, StepTime]:
        """Return for each row the step of an estimate if all rows of its source were not there.

        Args:
            source: tells a row's source.
            host: the host that estimates assume.
            ranged: whether the range is an estimate's; otherwise it is only what host and kinds of work explain.
        """
        rows = [*self.rows, *self.others]
        found: dict[str, StepTime] = {}
        for name in {source(row.row) for row in rows}:
            rest = Group(self.entry, [row for row in rows if source(row.row) != name], gpu=self.gpu)
            rates = rest.rates_of_estimates(host, ranged=ranged)
            for row in rows:
                if source(row.row) == name:
                    found[row.row.name] = rest.step(row, rates, host)
        return found

    def rates_of_estimates(self, host: Host, *, ranged: bool = True) -> ClockRates:
        """Return the rates that estimates have by these rows; arguments as for :meth:`without`."""
        rates = dataclasses.replace(self._rates_as_fitted, **host.numbers, **self._measured)
        if not ranged:
            return dataclasses.replace(rates, seconds_share=0.0)
        if self.is_fitted:
            return dataclasses.replace(rates, seconds_share=held_share([*self.needed_shares(host).values()]))
        return rates

    def needed_shares(self, host: Host) -> dict[str, float]:
        """Return for each row the ``seconds_share`` that has it inside its range with its source left out."""
        rows = [*self.rows, *self.others]
        source = _publisher if len({_publisher(row.row) for row in rows}) > 1 else _day
        steps = self.without(source, host, ranged=False)
        return {row.row.name: needed_share(steps[row.row.name], row.row.seconds) for row in rows}

    @staticmethod
    def step(row: AnyRow, rates: ClockRates, host: Host) -> StepTime:
        """Return a row's step by some rates."""
        step = row.step(dataclasses.replace(row.gpu, rates=rates))
        return dataclasses.replace(step, host_range=host.range)

    @functools.cached_property
    def _rates_as_fitted(self) -> ClockRates:
        return self._with(self._best_steps).rates if self.is_fitted else self.before

    @functools.cached_property
    def _measured(self) -> dict[str, Any]:
        """The largest share that each kind of work has in a row, and the number of rows, if numbers are fitted."""
        if not self.is_fitted:
            return {"measured_shares": {}, "num_rows": 0}
        gpu = dataclasses.replace(self.gpu, rates=self._rates_as_fitted)
        shares = [row.step(gpu).by_kind for row in (*self.rows, *self.others)]
        largest = {kind: max(each[kind] for each in shares) for kind in shares[0]}
        kept = {kind: round(share, 2) for kind, share in largest.items() if share >= 0.005}
        return {"measured_shares": kept, "num_rows": len(self.rows)}

    def predicted(self) -> list[float]:
        """Return each row's prediction by microbenchmarks alone."""
        return [self._seconds(row, self.before) for row in (*self.rows, *self.others)]

    @staticmethod
    def _seconds(row: AnyRow, rates: ClockRates) -> float:
        return row.seconds(dataclasses.replace(row.gpu, rates=rates))

    def _descend(self, slower_host: float) -> NDArray[np.float64]:
        """Return the best numbers found from those of microbenchmarks and a host that is so much slower."""
        steps = np.array([math.log(slower_host) if name == "operator_seconds" else 0.0 for name in SPREAD])
        best = steps
        for _ in range(ROUNDS):
            errors = self._errors(steps)
            steps = self._bounded(steps + self._improvement(errors, self._slopes(steps, errors), steps))
            best = min(best, steps, key=self._loss)
        print(
            f"{self.title}, host {slower_host}: loss {self._loss(best):.1f}, {best.round(2)}", file=sys.stderr
        )
        return best

    def _improvement(
        self, errors: NDArray[np.float64], slopes: NDArray[np.float64], steps: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return the Gauss-Newton step of the errors and the distances from the microbenchmarks together."""
        spread = np.array(list(SPREAD.values()))
        matrix = np.concatenate([slopes / NOISE, np.diag(1 / spread)])
        wanted = -np.concatenate([errors / NOISE, steps / spread])
        return np.linalg.lstsq(matrix, wanted, rcond=None)[0].astype(np.float64)

    def _loss(self, steps: NDArray[np.float64]) -> float:
        spread = np.array(list(SPREAD.values()))
        return float(((self._errors(steps) / NOISE) ** 2).sum() + ((steps / spread) ** 2).sum())

    def _errors(self, steps: NDArray[np.float64]) -> NDArray[np.float64]:
        rates = self._with(steps).rates
        return np.log([self._seconds(row, rates) for row in self.rows]) - self._log_measured

    def _slopes(self, steps: NDArray[np.float64], errors: NDArray[np.float64]) -> NDArray[np.float64]:
        moved = steps + 0.02 * np.eye(len(SPREAD))
        return np.stack([(self._errors(each) - errors) / 0.02 for each in moved], axis=1)

    def _with(self, steps: NDArray[np.float64]) -> Any:
        changed = {
            name: getattr(self.before, name) * math.exp(step)
            for name, step in zip(SPREAD, steps.tolist(), strict=True)
        }
        return dataclasses.replace(self.gpu, rates=dataclasses.replace(self.before, **changed))

    def _bounded(self, steps: NDArray[np.float64]) -> NDArray[np.float64]:
        most = [math.log(LARGEST[name] / getattr(self.before, name)) for name in SPREAD]
        return np.minimum(steps, most)


def _without_fits(gpu: str, compute_capability: tuple[int, int]) -> ClockRates:
    return clock_rates(gpu, compute_capability, [entry for entry in rate_entries() if "fitted" not in entry])


def _publisher(row: SecondsRow) -> str:
    return "/".join(row.url.split("/")[:5])


def _day(row: SecondsRow) -> str:
    return row.date


def groups_of(rows: Iterable[AnyRow]) -> list[Group]:
    """Return the rows by architecture."""
    found: dict[str, list[AnyRow]] = defaultdict(list)
    entries: dict[str, dict[str, Any]] = {}
    for row in rows:
        major, minor = row.gpu.compute_capability
        own = row.gpu.name in BOARD_OF_ITS_OWN
        key = row.gpu.name if own else f"{major}.{minor}"
        entries[key] = {"gpus": [key]} if own else {"compute_capability": key}
        found[key].append(row)
    return [
        Group(entries[key], found[key])
        for key in sorted(found, key=lambda key: find_gpu(found[key][0].row.gpu).compute_capability)
    ]


def needed_share(step: StepTime, seconds: float) -> float:
    """Return the ``seconds_share`` that puts measured seconds into the range of a step without one."""
    distance = math.log(seconds / step.seconds)
    explained = math.log(
        step.high_seconds / step.seconds if distance > 0 else step.seconds / step.low_seconds
    )
    return math.expm1(math.sqrt(max(0.0, distance**2 - explained**2)))


def held_share(errors: Sequence[float]) -> float:
    """Return the error of rank ``ceil(HELD (n + 1))``, rounded up to a hundredth; at least the least range."""
    rank = min(len(errors), math.ceil(HELD * (len(errors) + 1)))
    return max(LEAST_SHARE, math.ceil(100 * sorted(errors)[rank - 1]) / 100)


def entries_with(
    fits: Sequence[dict[str, Any]], kernels: Sequence[dict[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """Return the entries of the file with other fits, each after the microbenchmarks that it refines.

    Args:
        fits: those to whole runs.
        kernels: those to single kernels; None: as they are.
    """
    before = [entry for entry in rate_entries() if "fitted" not in entry]
    if kernels is not None:
        before = [*(entry for entry in before if "kernels" not in entry), *kernels]

    def level(entry: dict[str, Any]) -> int:
        return 2 if "gpus" in entry else 1 if "compute_capability" in entry else 0

    return sorted([*before, *fits], key=level)


def fit(groups: Sequence[Group]) -> None:
    """Fit every group with enough rows, and write numbers, predictions and ranges."""
    fits = [group.fitted() if group.is_fitted else ({}, group.predicted()) for group in groups]
    named = [
        group.entry | {"fitted": True} | numbers
        for group, (numbers, _) in zip(groups, fits, strict=True)
        if group.is_fitted
    ]
    # The ranges are of machines with the host that these fits make the middle one.
    host = Host.of(entries_with(named))
    entries: list[dict[str, Any]] = []
    results: dict[str, dict[str, Any]] = {}
    for group, (numbers, predicted) in zip(groups, fits, strict=True):
        needed, without = group.needed_shares(host), group.without(_publisher, host)
        rates = group.rates_of_estimates(host)
        for row, seconds in zip((*group.rows, *group.others), predicted, strict=True):
            step = without[row.row.name]
            results[row.row.name] = {
                "seconds": _rounded(seconds),
                "half_width": _rounded(_half_width(group.step(row, rates, host))),
                "needed_share": _rounded(needed[row.row.name]),
                "without_publisher": [
                    _rounded(each) for each in (step.low_seconds, step.seconds, step.high_seconds)
                ],
            }
        if not group.is_fitted:
            continue
        told = {name: getattr(rates, name) for name in ("seconds_share", "measured_shares", "num_rows")}
        source = f"scripts/clock_against_public.py: {len(group.rows)} rows of docs/clock.md ({group.title})"
        sources = dict.fromkeys([*numbers, "seconds_share", "measured_shares"], source)
        entries.append(group.entry | {"fitted": True} | numbers | told | {"sources": sources})
    RATES.write_text(json.dumps(entries_with(entries), indent=2) + "\n", encoding="utf-8")
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def _rounded(number: float) -> float:
    return float(f"{number:.5g}")


def _half_width(step: StepTime) -> float:
    return math.sqrt(step.high_seconds / step.low_seconds) - 1


def load_results() -> dict[str, float]:
    """Return the kept predictions by row, each with itself left out of the fit, in seconds."""
    return {name: result["seconds"] for name, result in kept_results().items()}


def load_without_publishers() -> dict[str, tuple[float, float, float]]:
    """Return the kept range of each row with its publisher left out, and the seconds between its ends."""
    return {name: tuple(result["without_publisher"]) for name, result in kept_results().items()}


@functools.cache
def kept_results() -> dict[str, dict[str, Any]]:
    """Return what is kept of each row, by name."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def table(rows: Sequence[SecondsRow]) -> str:
    """Return the summary by architecture, and every row, the farthest miss first."""
    results = load_results()

    def error(row: SecondsRow) -> float:
        return results[row.name] / row.seconds - 1

    by_group: dict[str, list[SecondsRow]] = defaultdict(list)
    for row in rows:
        major, minor = find_gpu(row.gpu).compute_capability
        by_group[f"{major}.{minor}, {row.gpu}{', held out' if row.held_out else ''}"].append(row)
    lines = [
        *caveat_of_the_clock(),
        "| architecture | rows | median error | worst | bias | inside without their source | half the width | "
        "inside without their publisher | half the width | numbers |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for title, members in [
        *sorted(by_group.items(), key=lambda pair: find_gpu(pair[1][0].gpu).compute_capability),
        ("all", [row for row in rows if not row.held_out]),
        ("all, held out", [row for row in rows if row.held_out]),
        ("all of both", rows),
        ("all of both but the T4's", [row for row in rows if row.gpu != "t4"]),
    ]:
        errors = [error(row) for row in members]
        bias = math.exp(statistics.mean(math.log1p(each) for each in errors)) - 1
        gpu = find_gpu(members[0].gpu)
        shown = f"fitted, runs like these within a factor of {1 + gpu.rates.seconds_share:.2f}"
        if title.startswith("all"):
            shown = ""
        elif members[0].held_out:
            shown = "fixed before these were found"
        elif not any(row.same_kernels for row in members):
            shown = "not fitted to these, of other kernels"
        lines.append(
            f"| {title} | {len(members)} | {statistics.median(map(abs, errors)):.1%} | "
            f"{max(errors, key=abs):+.1%} | {bias:+.1%} | {_ranges(members)} | {shown} |"
        )
    lines += [
        "",
        "| run | GPU | measured s | predicted s | error | what runs here | the source leaves open |",
        "|---|---|---:|---:|---:|---|---|",
    ]
    lines += [
        f"| [{row.name}]({row.url}) | {row.gpu} | {row.seconds:.4g} | {results[row.name]:.4g} | {error(row):+.1%} | "
        f"{row.program}{f', torch {row.torch}' if row.torch else ''}{', held out' if row.held_out else ''} | "
        f"{'; '.join(row.open)} |"
        for row in sorted(rows, key=lambda row: -abs(error(row)))
    ]
    return "\n".join(lines) + "\n"


def _ranges(rows: Sequence[SecondsRow]) -> str:
    """Return cells: how many rows are inside, and half of the range's width in the median.

    First of the ranges that estimates print, with each row's source left out of the numbers; then of those that they
    would print had the row's publisher published nothing.
    """
    kept = [kept_results()[row.name] for row in rows]
    shares = [find_gpu(row.gpu).rates.seconds_share for row in rows]
    printed = sum(each["needed_share"] <= share for each, share in zip(kept, shares, strict=True))
    width = statistics.median(each["half_width"] for each in kept)
    ends = [load_without_publishers()[row.name] for row in rows]
    inside = sum(low <= row.seconds <= high for row, (low, _, high) in zip(rows, ends, strict=True))
    half = statistics.median(math.sqrt(high / low) - 1 for low, _, high in ends)
    return f"{printed} of {len(rows)} | {width:.0%} | {inside} of {len(rows)} | {half:.0%}"


def page(text: str) -> str:
    """Return the page with the present table."""
    return marked_table.with_table(text, Path(__file__).name, table([*load_rows(), *measured_rows()]))


def main() -> int:
    """Trace what is missing, fit if requested, write the page."""
    parser = parser_of(__doc__)
    parser.add_argument("--traces", type=Path, default=Path(".cache/clock-traces"), help="folder of traces")
    parser.add_argument("--fit", action="store_true", help="fit, and write the rates")
    arguments = parser.parse_args()
    rows = [*measured_rows(), *load_rows()]
    if arguments.fit:
        traced: list[AnyRow] = []
        for number, row in enumerate(rows, 1):
            print(f"{number} of {len(rows)}: {row.name}", file=sys.stderr)
            is_recipe = "overrides" in row.settings
            traced.append(TracedRecipe(row) if is_recipe else TracedRow(row, arguments.traces))
        fit(groups_of(traced))
    else:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
