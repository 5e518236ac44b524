"""Parts of an item of a lease, each a row of its own; and how long a call takes a GPU and its host."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import statistics
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Numbers = dict[str, Any]

NOT_IN_CACHE_BYTES = 2**29
"""Bytes of inputs to take turns with: several times the largest L2 cache of a GPU (126 MB, B200)."""

_CYCLES_A_SECOND = 2e9
"""About as many as a GPU's clock makes; what waits for the host may wait longer."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The device of a lease, and an item's time on it.

    Args:
        device: ``cuda`` or ``cpu``.
        tiny: whether sizes are so small that a CPU needs no time for them.
        seconds: seconds that the item has, from the start of its process.
    """

    device: str
    tiny: bool
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Part:
    """One row.

    Args:
        name: the row's name in its item.
        run: measures, and returns numbers whose names carry their units.
        seconds: about how long that takes a GPU; with less time left it is not begun.
        settings: what tells its numbers from those of other parts.
        needs: packages that have to be installed, by the names that they are imported by.
        needs_cuda: whether a CPU cannot run it.
    """

    name: str
    run: Callable[[], Numbers]
    seconds: float
    settings: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    needs_cuda: bool = False


def measure(
    parts: Iterable[Part],
    setting: Setting,
    tell: Callable[[dict[str, Any]], None],
    *,
    measured: Collection[str] = (),
    killed: Collection[str] = (),
) -> None:
    """Measure parts one after the other; what one fails of costs the others nothing.

    Args:
        parts: in the order of what they decide.
        setting: what they are measured on.
        tell: takes a row, and before it which part begins.
        measured: names of parts that have been measured before.
        killed: names of those in which the time was over before: they come last.
    """
    ends = time.monotonic() + setting.seconds
    for part in sorted(parts, key=lambda part: part.name in killed):
        if part.name in measured:
            continue
        row = {"part": part.name, "settings": part.settings}
        left = ends - time.monotonic()
        missing = [name for name in part.needs if importlib.util.find_spec(name) is None]
        if part.needs_cuda and setting.device != "cuda":
            tell({**row, "outcome": "left out", "why": "a CPU cannot run it"})
        elif missing:
            tell({**row, "outcome": "missing", "why": f"not installed: {', '.join(missing)}"})
        elif setting.device == "cuda" and left < part.seconds:
            tell({**row, "outcome": "no time", "why": f"about {part.seconds:.0f} s, {left:.0f} are left"})
        else:
            tell({"begins": part.name})
            begin = time.monotonic()
            try:
                found = {"outcome": "measured", "numbers": part.run()}
            except (
                Exception
            ) as error:  # a kernel that a version lacks, memory that is short: the next part may do
                traceback.print_exc()
                found = {"outcome": "failed", "why": f"{type(error).__name__}: {error}"[:2000]}
            tell({**row, **found, "seconds": round(time.monotonic() - begin, 2)})
        gc.collect()
        if setting.device == "cuda" and torch.cuda.is_initialized():
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class Times:
    """Seconds of a call.

    Args:
        device: seconds of the GPU's work alone; on a CPU, of the call.
        host: seconds until the host has launched it all.
    """

    device: float
    host: float


def timed(calls: Sequence[Callable[[], object]], device: str, *, repeats: int = 12) -> Times:
    """Return the median seconds of a call; the calls take turns, so that inputs come from memory, not from a cache.

    A GPU that has done what it was given waits for the host, which takes longer to launch most kernels than they run:
    so it is held up first, until the host has launched several calls, and its seconds have no gaps.
    """
    turns = itertools.cycle(calls)
    for _ in range(max(3, len(calls))):
        next(turns)()
    if device != "cuda":
        seconds = statistics.median(_seconds_of(next(turns)) for _ in range(repeats))
        return Times(seconds, seconds)
    torch.cuda.synchronize()
    host = statistics.median(_seconds_of(next(turns)) for _ in range(repeats))
    torch.cuda.synchronize()
    at_once = (
        4  # a thousand launches fit into a GPU's queue; a layer's forward and backward pass has up to 200
    )
    seen = []
    for _ in range(-(-repeats // at_once)):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(2 * at_once * host * _CYCLES_A_SECOND))
        begin.record()
        for _ in range(at_once):
            next(turns)()
        end.record()
        torch.cuda.synchronize()
        seen.append(begin.elapsed_time(end) / 1000 / at_once)
    return Times(statistics.median(seen), host)


def turns(num_bytes: float, device: str) -> int:
    """Return how many inputs take turns, so that a call that reads and writes so many bytes finds none in a cache."""
    return min(-(-NOT_IN_CACHE_BYTES // round(num_bytes)), 64) if device == "cuda" else 1


def wait(device: str) -> None:
    """Wait for a GPU's work."""
    if device == "cuda":
        torch.cuda.synchronize()


def _seconds_of(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
