"""Fit the clock's rates by kind of kernel to public timings of single kernels, and score them.

    python scripts/clock_kernels.py [--draw CLONES] [--profiles]

The rows are ``tests/data/measured/kernels-public.json``; ``--draw`` draws those of tables again
(``measuring/kernel_tables.py``), and keeps those that were typed from pages. For each architecture, and for boards that
have an entry of their own, the numbers of a kind are those with the least mean distance of logarithms from a
publisher's rows, and of several publishers the median. They become an entry of
``lowmem_ft/foundation/catalog/clock_rates.json``, from which ``clock_against_public.py --fit`` then begins. Every row
is predicted with its *publisher* left out: by the other rows on its board, and without such rows by the median of the
other boards. A kind is known on a board where such errors of ``FEWEST_ROWS`` rows or more are at most ``MEDIAN`` in the
median and ``WORST`` at most, and on boards with fewer rows where the others' would be. The scores are written into
``docs/clock.md``.

``--profiles`` traces the three runs of ``profiles-cuda.json``, to which nothing is fitted, and keeps their seconds
by kind next to them, in ``kernels-clocked.json``.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import marked_table
from clock_against_public import LARGEST, PAGE, RATES, ROWS, entries_with
from command_line import parser_of
from measuring.kernel_tables import drawn_rows
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
FEWEST_ROWS = 4
"""Rows of a kind from which a board decides whether the kind is known on it."""
GAP_SECONDS = 2.5e-6
"""Seconds that a loop which times one kernel adds to each: those of the smallest products in the sources."""
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
        """Its architecture, or the first of the boards that have an entry of their own.

        Those are held down by their power or sum at half the rate, so that they say nothing about their architecture.
        """
        major, minor = find_gpu(self.gpu).compute_capability
        return alike(self.gpu)[0] if alike(self.gpu) else f"{major}.{minor}"

    @property
    def publisher(self) -> str:
        """Its source without the program: several programs may be of one publisher."""
        return self.source.split(",")[0]

    def predicted(self, rates: ClockRates) -> float:
        """Return the seconds by some rates."""
        gpu = dataclasses.replace(find_gpu(self.gpu), rates=rates)
        compute = self.flops / arithmetic_rate(gpu, self.kind, self.dtype if self.flops else "", self.shape)
        return max(compute, self.bytes / traffic_rate(gpu, self.kind)) + GAP_SECONDS


@functools.cache
def alike(gpu: str) -> tuple[str, ...]:
    """Return the boards that share an entry with a GPU; none: it is like its architecture."""
    for entry in rate_entries():
        if "fitted" not in entry and "kernels" not in entry and gpu in entry.get("gpus", ()):
            return tuple(entry["gpus"])
    return ()


def load_rows() -> list[KernelRow]:
    """Return every row."""
    rows = json.loads(KERNELS.read_text(encoding="utf-8"))["rows"]
    return [KernelRow(**row | {"shape": tuple(row["shape"])}) for row in rows]


def with_rows(drawn: Sequence[dict[str, Any]]) -> str:
    """Return the file of rows with those of tables replaced."""
    kept = json.loads(KERNELS.read_text(encoding="utf-8"))
    sources = {row["source"] for row in drawn}
    rows = [row for row in kept["rows"] if row["source"] not in sources] + [*drawn]
    rows.sort(key=lambda row: (KERNEL_KINDS.index(row["kind"]), row["gpu"], row["source"], row["dtype"]))
    head = json.dumps(kept["sources"], indent=1).replace("\n", "\n ")
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    return f'{{\n "sources": {head},\n "rows": [\n{lines}\n ]\n}}\n'


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
    """Return rates with a group's numbers as the median of what each publisher tells.

    So a machine whose power or heat holds it down does not set a number where others tell it, too.
    """
    publishers = dict.fromkeys(row.publisher for row in rows)
    each = [_fitted_to([row for row in rows if row.publisher == name], group, rates) for name in publishers]
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

    @property
    def has_enough(self) -> bool:
        """True if it has enough rows to tell."""
        return len(self.rows) >= FEWEST_ROWS


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
            for publisher in dict.fromkeys(row.publisher for row in found):
                rest = [row for row in found if row.publisher != publisher]
                rates = (
                    fitted(group, rest, base[board])
                    if rest
                    else inherited(group, found[0].kind, base[board], others)
                )
                left_out = [row for row in found if row.publisher == publisher]
                errors += [row.predicted(rates) / row.seconds - 1 for row in left_out]
            yield Score(group=group, board=board, rows=found, errors=errors)


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
    elsewhere = [score.group for score in scores_elsewhere(rows, before, rates) if score.is_known]
    entries = [_entry("", rates[boards[0]], [], elsewhere)]
    entries += [
        _entry(board, rates[board], [s for s in scores if s.board == board], elsewhere) for board in boards
    ]
    return entries, scores


def scores_elsewhere(
    rows: Sequence[KernelRow], before: dict[str, ClockRates], rates: dict[str, ClockRates]
) -> Iterator[Score]:
    """Yield the scores of kinds on boards without rows, as if each board with enough rows had none.

    Args:
        rows: the rows.
        before: for each board, the rates that it has without rows.
        rates: for each board, its rates with them.
    """
    for kind in KERNEL_KINDS:
        found = [row for row in rows if row.group == kind]
        boards = [
            board for board, count in Counter(row.board for row in found).items() if count >= FEWEST_ROWS
        ]
        if len(boards) < FEWEST_ROWS:
            continue
        told = [row for row in found if row.board in boards]
        errors = []
        for row in told:
            others = [rates[board] for board in boards if board != row.board]
            without = before[row.board]  # whose products and bandwidth are hand-written
            if numbers_of(kind) == ("traffic",):
                without = inherited(kind, kind, without, others)
            errors.append(row.predicted(without) / row.seconds - 1)
        yield Score(group=kind, board="", rows=told, errors=errors)


def _name_of(board: str) -> str:
    return "" if "." in board else board


def _entry(
    board: str, rates: ClockRates, scores: Sequence[Score], elsewhere: Sequence[str]
) -> dict[str, Any]:
    """Return a board's entry, with the numbers that its rows tell, and the kinds that are known on it.

    Args:
        board: its name; empty: the boards without rows.
        rates: its rates.
        scores: its scores.
        elsewhere: the kinds that are known on a board without rows of them.
    """
    numbers: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for score in scores:
        for name in numbers_of(score.group):
            said = f"scripts/clock_kernels.py: {len(score.rows)} rows of {_publishers(score.rows)}"
            if name == "traffic":
                kind = score.rows[0].kind
                numbers.setdefault(name, {})[kind] = _rounded(rates.traffic.get(kind, 1.0))
                sources[name] = f"{sources[name]}; {said}" if name in sources else said
            else:
                numbers[name], sources[name] = _rounded(getattr(rates, name)), said
    told = {score.group: score.is_known for score in scores if score.has_enough}
    numbers["known_kinds"] = [kind for kind in KERNEL_KINDS if told.get(kind, kind in elsewhere)]
    sources["known_kinds"] = "scripts/clock_kernels.py"
    if not board:
        return {"kernels": True} | numbers | {"sources": sources}
    named = {"compute_capability": board} if "." in board else {"gpus": list(alike(board))}
    return named | {"kernels": True} | numbers | {"sources": sources}


def _rounded(number: float) -> float:
    return float(f"{number:.3g}")


def _publishers(rows: Sequence[KernelRow]) -> str:
    return ", ".join(sorted({row.publisher for row in rows}))


def table(scores: Sequence[Score]) -> str:
    """Return the scores by kind and board, and the profiles by kind."""
    heads = ("kind", "GPUs", "rows", "publishers", "median error", "worst", "")
    lines = []
    groups = dict.fromkeys(score.group for score in scores)
    for score in (score for group in groups for score in scores if score.group == group):
        sizes = [abs(error) for error in score.errors]
        verdict = "known" if score.is_known else "not known"
        verdict += ", by few rows" * (not score.has_enough)
        gpus = ", ".join(dict.fromkeys(row.gpu for row in score.rows))
        median, worst = f"{statistics.median(sizes):.0%}", f"{max(score.errors, key=abs):+.0%}"
        lines.append(
            (score.group, gpus, str(len(score.rows)), _publishers(score.rows), median, worst, verdict)
        )
    without = ", ".join(kind for kind in KERNEL_KINDS if kind not in groups)
    lines.append((without, "", "0", "", "", "", "not known"))
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
    parser.add_argument(
        "--draw", type=Path, metavar="CLONES", help="folder of clones of the sources' repositories"
    )
    arguments = parser.parse_args()
    if arguments.draw is not None:
        KERNELS.write_text(with_rows(list(drawn_rows(arguments.draw))), encoding="utf-8")
    if arguments.profiles:
        CLOCKED.write_text(json.dumps(predicted_profiles(), indent=1) + "\n", encoding="utf-8")
    entries, scores = fit(load_rows())
    fits = [entry for entry in rate_entries() if "fitted" in entry]
    RATES.write_text(json.dumps(entries_with(fits, entries), indent=2) + "\n", encoding="utf-8")
    marked_table.put_table(PAGE, Path(__file__).name, table(scores))
    return 0


if __name__ == "__main__":
    sys.exit(main())
