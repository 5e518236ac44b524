"""Fit the clock's rates by kind of kernel to public timings of single kernels, and score them.

    python scripts/clock_kernels.py [--profiles]

The rows are ``tests/data/measured/kernels-public.json``. For each architecture, and for boards that are held down by
their power, the numbers of a kind are those with the least mean distance of logarithms from a source's rows, and of
several sources the median. They become an entry of ``lowmem_ft/foundation/catalog/clock_rates.json``, from which
``clock_against_public.py --fit`` then begins. Every row is predicted with its *source* left out: by the other sources'
rows on its architecture, and without such rows by the median of the other architectures. A kind is known on an
architecture where such errors are at most ``MEDIAN`` in the median and ``WORST`` at most. The scores are written into
``docs/clock.md``.

``--profiles`` traces the three runs of ``profiles-cuda.json``, to which nothing is fitted, and keeps their seconds
by kind next to them, in ``kernels-clocked.json``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import marked_table
from clock_against_public import LARGEST, PAGE, RATES, ROWS, entries_with
from command_line import parser_of
from measuring.profiled_kinds import predicted_profiles

from lowmem_ft.foundation.catalog.clock_rates import ClockRates, clock_rates, rate_entries
from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.virtual_gpu.calls.kernel_kinds import KERNEL_KINDS, KernelKind
from lowmem_ft.virtual_gpu.replay.timing.kernel_rates import arithmetic_rate, traffic_rate

KERNELS = ROWS.with_name("kernels-public.json")
PROFILES = ROWS.with_name("profiles-cuda.json")
CLOCKED = ROWS.with_name("kernels-clocked.json")

MEDIAN, WORST = 0.15, 0.40
"""Errors of rows whose source is left out, with which a kind counts as known."""
HELD_DOWN = ("l4",)
"""Boards whose power limits products, so that they say nothing about their architecture."""
GAP_SECONDS = 2.5e-6
"""Seconds that a loop which times one kernel adds to each: those of the smallest products in the sources."""
CONTIGUOUS = ("element-wise",)
"""Kinds whose rows are all of contiguous tensors, so that they never vouch for those of a run, which are not."""
_STEPS = 15
_ROUNDS = 8
_NARROWER = 0.55


@dataclass(frozen=True, kw_only=True)
class KernelRow:
    """A published timing of one kernel.

    Args:
        kind: its kind.
        op: the operation by its source's name.
        source: key of its source.
        gpu: name in the catalogue.
        dtype: type of the operands.
        shape: its sizes.
        flops: operations of its products.
        bytes: bytes read and written.
        seconds: measured seconds.
    """

    kind: KernelKind
    op: str
    source: str
    gpu: str
    dtype: str
    shape: tuple[int, ...]
    flops: int
    bytes: int
    seconds: float

    @property
    def group(self) -> str:
        """The rows that share numbers: its kind, and of products the units that compute them."""
        units = {"float32": " in float32", "float8_e4m3fn": " in float8"}.get(self.dtype, "")
        return self.kind + units * (self.kind == "products")

    @property
    def board(self) -> str:
        """Its architecture, or its name if its power holds it down."""
        major, minor = find_gpu(self.gpu).compute_capability
        return self.gpu if self.gpu in HELD_DOWN else f"{major}.{minor}"

    def predicted(self, rates: ClockRates) -> float:
        """Return the seconds by some rates."""
        gpu = dataclasses.replace(find_gpu(self.gpu), rates=rates)
        compute = self.flops / arithmetic_rate(gpu, self.kind, self.dtype if self.flops else "", self.shape)
        return max(compute, self.bytes / traffic_rate(gpu, self.kind)) + GAP_SECONDS


def load_rows() -> list[KernelRow]:
    """Return every row."""
    rows = json.loads(KERNELS.read_text(encoding="utf-8"))["rows"]
    return [KernelRow(**row | {"shape": tuple(row["shape"])}) for row in rows]


def numbers_of(group: str) -> tuple[str, ...]:
    """Return the numbers that are fitted to a group's rows; ``traffic`` stands for its kind's share."""
    return {
        "products": ("products",),
        "products in float32": ("float32_products",),
        "products in float8": ("float8_products",),
        "attention": ("attention", "attention_keys"),
        "attention backward": ("attention_backward", "backward_keys"),
        "element-wise": ("bandwidth",),
    }.get(group, ("traffic",))


def fitted(group: str, rows: Sequence[KernelRow], rates: ClockRates) -> ClockRates:
    """Return rates with a group's numbers as the median of what each source tells.

    So a machine whose power or heat holds it down does not set a number where others tell it, too.
    """
    sources = dict.fromkeys(row.source for row in rows)
    each = [_fitted_to([row for row in rows if row.source == source], group, rates) for source in sources]
    return inherited(group, rows[0].kind, rates, each)


def _fitted_to(rows: Sequence[KernelRow], group: str, rates: ClockRates) -> ClockRates:
    """Return rates with a group's numbers moved to the least mean distance from the rows, one number at a time."""
    kind = rows[0].kind

    def moved(rates: ClockRates, name: str, factor: float) -> ClockRates:
        if name == "traffic":
            share = rates.traffic.get(kind, 1.0)
            return dataclasses.replace(rates, traffic={**rates.traffic, kind: share * factor})
        changed = min(getattr(rates, name) * factor, LARGEST.get(name, math.inf))
        return dataclasses.replace(rates, **{name: changed})

    def distance(rates: ClockRates) -> float:
        return statistics.mean(abs(math.log(row.predicted(rates) / row.seconds)) for row in rows)

    width = 1.2
    for _ in range(_ROUNDS):
        for name in numbers_of(group):
            factors = [math.exp(width * (step / (_STEPS - 1) - 0.5)) for step in range(_STEPS)]
            rates = min((moved(rates, name, factor) for factor in factors), key=distance)
        width *= _NARROWER
    return rates


@dataclass(frozen=True, kw_only=True)
class Score:
    """The errors of one group's rows on one board, without their source.

    Args:
        group: the group.
        board: architecture, or name of the board.
        rows: its rows.
        errors: relative error of each.
    """

    group: str
    board: str
    rows: list[KernelRow]
    errors: list[float]

    @property
    def is_known(self) -> bool:
        """True if the errors are small enough."""
        sizes = [abs(error) for error in self.errors]
        return statistics.median(sizes) <= MEDIAN and max(sizes) <= WORST


def scores_of(rows: Sequence[KernelRow], base: dict[str, ClockRates]) -> Iterator[Score]:
    """Yield the scores of every group and board.

    Args:
        rows: the rows.
        base: for each board, the rates before these rows; of kinds that are fitted, those of the other kinds.
    """
    groups: dict[str, dict[str, list[KernelRow]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        groups[row.group][row.board].append(row)
    for group, boards in groups.items():
        whole = {board: fitted(group, found, base[board]) for board, found in boards.items()}
        for board, found in boards.items():
            others = [rates for other, rates in whole.items() if other != board]
            errors = []
            for source in dict.fromkeys(row.source for row in found):
                rest = [row for row in found if row.source != source]
                rates = (
                    fitted(group, rest, base[board])
                    if rest
                    else inherited(group, found[0].kind, base[board], others)
                )
                errors += [
                    row.predicted(rates) / row.seconds - 1 if row.source == source else math.nan
                    for row in found
                ]
            together = [error for error in errors if not math.isnan(error)]
            yield Score(group=group, board=board, rows=found, errors=together)


def inherited(group: str, kind: str, rates: ClockRates, others: Sequence[ClockRates]) -> ClockRates:
    """Return rates with a group's numbers as the median of others'; unchanged without others."""
    if not others:
        return rates
    changes: dict[str, Any] = {}
    for name in numbers_of(group):
        if name == "traffic":
            share = statistics.median(each.traffic.get(kind, 1.0) for each in others)
            changes[name] = {**rates.traffic, kind: share}
        else:
            changes[name] = statistics.median(getattr(each, name) for each in others)
    return dataclasses.replace(rates, **changes)


def fit(rows: Sequence[KernelRow]) -> tuple[list[dict[str, Any]], list[Score]]:
    """Return the entries of the rates, and the scores."""
    boards = sorted({row.board for row in rows})
    gpus = {board: find_gpu(next(row.gpu for row in rows if row.board == board)) for board in boards}
    kept = [entry for entry in rate_entries() if "fitted" not in entry and "kernels" not in entry]
    before = {
        board: clock_rates(_name_of(board), gpu.compute_capability, kept) for board, gpu in gpus.items()
    }
    rates = dict(before)
    # The bandwidth first: other kinds' shares are of what element-wise kernels reach.
    groups = sorted({row.group for row in rows}, key=lambda group: (group != "element-wise", group))
    for group in groups:
        with_rows = {row.board for row in rows if row.group == group}
        for board in with_rows:
            found = [row for row in rows if (row.group, row.board) == (group, board)]
            rates[board] = fitted(group, found, rates[board])
    scores = list(scores_of(rows, rates))
    return [_entry(board, rates[board], [s for s in scores if s.board == board]) for board in boards], scores


def _name_of(board: str) -> str:
    return board if board in HELD_DOWN else ""


def _entry(board: str, rates: ClockRates, scores: Sequence[Score]) -> dict[str, Any]:
    """Return a board's entry, with the numbers that its rows tell."""
    numbers: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for score in scores:
        for name in numbers_of(score.group):
            said = f"scripts/clock_kernels.py: {len(score.rows)} rows of {', '.join(_sources(score.rows))}"
            if name == "traffic":
                kind = score.rows[0].kind
                numbers.setdefault(name, {})[kind] = _rounded(rates.traffic.get(kind, 1.0))
                sources[name] = f"{sources[name]}; {said}" if name in sources else said
            else:
                numbers[name], sources[name] = _rounded(getattr(rates, name)), said
    known = [score.group for score in scores if score.is_known and score.group in KERNEL_KINDS]
    known = [kind for kind in known if kind not in CONTIGUOUS]
    if known:
        numbers["known_kinds"] = known
        sources["known_kinds"] = "scripts/clock_kernels.py"
    named = {"gpus": [board]} if board in HELD_DOWN else {"compute_capability": board}
    return named | {"kernels": True} | numbers | {"sources": sources}


def _rounded(number: float) -> float:
    return float(f"{number:.3g}")


def _sources(rows: Sequence[KernelRow]) -> list[str]:
    return list(dict.fromkeys(row.source for row in rows))


def table(scores: Sequence[Score]) -> str:
    """Return the scores by kind and board, and the profiles by kind."""
    heads = ("kind", "GPUs", "rows", "sources", "median error", "worst", "")
    lines = []
    groups = dict.fromkeys(score.group for score in scores)
    for score in (score for group in groups for score in scores if score.group == group):
        sizes = [abs(error) for error in score.errors]
        verdict = "known" if score.is_known else "not known"
        verdict += ", where contiguous" * (score.is_known and score.group in CONTIGUOUS)
        gpus = ", ".join(dict.fromkeys(row.gpu for row in score.rows))
        median, worst = f"{statistics.median(sizes):.0%}", f"{max(score.errors, key=abs):+.0%}"
        sources = "; ".join(_sources(score.rows))
        lines.append((score.group, gpus, str(len(score.rows)), sources, median, worst, verdict))
    lines += [(kind, "", "0", "", "", "", "not known") for kind in KERNEL_KINDS if kind not in groups]
    return marked_table.table_of(heads, lines, numbers=(2, 4, 5)) + "\n\n" + _table_of_profiles()


def _table_of_profiles() -> str:
    runs = json.loads(PROFILES.read_text(encoding="utf-8"))
    clocked = json.loads(CLOCKED.read_text(encoding="utf-8"))
    kinds = list(clocked[0])
    lines = []
    for run, by_clock in zip(runs, clocked, strict=True):
        cells = [f"{by_clock[kind]:.2f} / {run['seconds_by_kind'][kind]:.2f}" for kind in kinds]
        lines.append((run["run"], *cells, f"{sum(by_clock.values()):.2f} / {run['busy_seconds']:.2f}"))
    return marked_table.table_of(("predicted / profiled seconds", *kinds, "GPU busy"), lines) + "\n"


def main() -> int:
    """Fit, score, write the rates and the page."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--profiles", action="store_true", help="trace the profiled runs, and keep their seconds"
    )
    if parser.parse_args().profiles:
        CLOCKED.write_text(json.dumps(predicted_profiles(), indent=1) + "\n", encoding="utf-8")
    entries, scores = fit(load_rows())
    fits = [entry for entry in rate_entries() if "fitted" in entry]
    RATES.write_text(json.dumps(entries_with(fits, entries), indent=2) + "\n", encoding="utf-8")
    marked_table.put_table(PAGE, Path(__file__).name, table(scores))
    return 0


if __name__ == "__main__":
    sys.exit(main())
