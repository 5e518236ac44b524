"""The fastest of a few settings on each GPU: rows of a micro-batch, and layers that keep their activations.

More rows spare the host launches, several processes exchanges, and the device the work that every micro-batch repeats;
a layer that keeps its activations spares their recomputation. Both take memory. On a GPU the ladder begins with one row
and the most layers that fit, and climbs to more rows for as long as a step gains by them. Settings that others have
shown to need more than a GPU has are not estimated there, nor those that would leave it too little to spare where only
one with enough would be taken; and what no GPU asks for is not traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.foundation.memory.uncertainty import with_headroom
from lowmem_ft.planning.estimator.estimate import CannotRun

QUARTERS = 4
"""Parts of the layers that keep their activations together: a quarter of them is worth about a twelfth of a step."""

WORTH_MORE_ROWS = 1.03
"""Gain in speed below which a step with more rows is not worth its memory."""

_WORTH_A_TRY = 1.1
"""Gain that must be possible before more rows are tried where not all layers could then keep their activations."""

_GAIN_OF_DEVICE = 1.05
"""The gain of twice the rows beyond the host's time: work that a micro-batch does once, such as unpacking weights."""

Answer = MemoryEstimate | CannotRun

CANNOT_RUN = 4
"""Rank of what cannot be done."""


def rank_of(answer: Answer) -> int:
    """Return the rank of an answer, best first: it fits, fits tightly, may fit, does not fit, cannot be done."""
    if isinstance(answer, CannotRun):
        return CANNOT_RUN
    if answer.fits:
        return int(answer.tight)
    return 2 if answer.verdict == "may not fit" else 3


class Setting(NamedTuple):
    """A place on the ladder.

    Args:
        rows: rows of a micro-batch; None: the recipe's own.
        kept: quarters of the layers that keep their activations; None: the recipe's own.
    """

    rows: int | None = None
    kept: int | None = None


@dataclass(frozen=True, kw_only=True)
class Found:
    """A setting, and its answer on a GPU."""

    setting: Setting
    answer: Answer

    @property
    def rank(self) -> int:
        """Its rank, see :func:`rank_of`."""
        return rank_of(self.answer)

    @property
    def tokens_per_second(self) -> float:
        """Its speed; 0 if unknown."""
        step = None if isinstance(self.answer, CannotRun) else self.answer.step
        return 0.0 if step is None else step.tokens_per_second

    @property
    def waiting_share(self) -> float:
        """Share of a step in which the GPU waits for its host, or for what other processes send."""
        if isinstance(self.answer, CannotRun) or self.answer.step is None:
            return 0.0
        step = self.answer.step
        if self.answer.processes is None or not step.by_operator:
            return step.host_share
        return max(step.host_share, 1 - sum(step.by_operator.values()) / step.seconds)


class SettingsLadder:
    """The settings of one program on GPUs that share its traces.

    Args:
        rows: rows of a micro-batch, the fewest first; or None alone.
        kept: quarters of the layers that keep their activations, the most first; or None alone.
        estimate: estimates a setting on a GPU.
        room_bytes: returns the bytes that a process may hold in tensors on a GPU.
    """

    def __init__(
        self,
        *,
        rows: Sequence[int | None] = (None,),
        kept: Sequence[int | None] = (None,),
        estimate: Callable[[Setting, Gpu], Answer],
        room_bytes: Callable[[Gpu], float],
    ) -> None:
        self._rows = rows
        self._kept = kept
        self._estimate = estimate
        self._room_bytes = room_bytes
        self._needs: dict[Setting, int] = {}
        self._activations: dict[Setting, int] = {}

    def fastest(self, gpu: Gpu) -> Found:
        """Return the fastest setting that fits a GPU with room to spare; if none does, the nearest to it."""
        fewest, *more = self._rows
        best = self._with_most_kept(fewest, self._kept, gpu)
        for rows in more:
            found = self._with_more_rows(best, rows, gpu) if best.rank == 0 else None
            if found is None or found.rank > 0:
                break
            if found.tokens_per_second < WORTH_MORE_ROWS * best.tokens_per_second:
                break
            best = found
        return best

    def _with_more_rows(self, best: Found, rows: int | None, gpu: Gpu) -> Found | None:
        """Return a setting with more rows; None where none is worth a try."""
        before = best.setting.kept
        gain = _GAIN_OF_DEVICE / max(1e-9, 1 - best.waiting_share)
        as_many = Setting(rows, before)
        if not self._is_surely_tight(as_many, gpu) and (before == self._kept[0] or gain >= _WORTH_A_TRY):
            found = self._found(as_many, gpu)
            if found.rank == 0:
                return found
        fewer = [
            kept
            for kept in self._kept
            if before is not None
            and kept is not None
            and kept < before
            and not self._is_surely_too_much(Setting(rows, kept), gpu)
        ]
        if not fewer or before is None or gain * _time_of(before) / _time_of(fewer[0]) < _WORTH_A_TRY:
            return None
        return self._with_most_kept(rows, fewer, gpu)

    def _with_most_kept(self, rows: int | None, choices: Sequence[int | None], gpu: Gpu) -> Found:
        """Return the setting of so many rows that keeps the most activations with room to spare."""
        most, *between, least = [Setting(rows, kept) for kept in (choices[0], *choices)]
        best: Found | None = None
        for setting in dict.fromkeys((most, least, *between)):
            is_least = setting == least
            if setting == most and not is_least and self._is_surely_too_much(setting, gpu):
                continue
            if setting not in (most, least) and self._is_surely_tight(setting, gpu):
                continue  # the least has room to spare, and only what has it too is better
            found = self._found(setting, gpu)
            if found.rank == 0 and not is_least:
                return found
            if best is None or found.rank < best.rank or (found.rank == best.rank > 1):
                best = found
            if is_least and found.rank > 0:
                break  # nothing takes less
        assert best is not None
        return best

    def _found(self, setting: Setting, gpu: Gpu) -> Found:
        answer = self._estimate(setting, gpu)
        if not isinstance(answer, CannotRun) and setting not in self._needs:
            self._needs[setting] = answer.reserved_peak_bytes
            self._activations[setting] = answer.by_category_at_peak.get("activation", 0)
        return Found(setting=setting, answer=answer)

    def _is_surely_too_much(self, setting: Setting, gpu: Gpu) -> bool:
        return self._least_bytes(setting) > self._room_bytes(gpu)

    def _is_surely_tight(self, setting: Setting, gpu: Gpu) -> bool:
        """Return whether a setting does not fit with room to spare: the share of it also counts what is not tensors."""
        return with_headroom(self._least_bytes(setting)) > self._room_bytes(gpu)

    def _least_bytes(self, setting: Setting) -> float:
        """Return what a setting takes, or the least that it can by what others take."""
        if setting in self._needs:
            return 0.99 * self._needs[setting]
        least = [0.0]
        for other, needs in self._needs.items():
            if other.kept == setting.kept and 0 < (other.rows or 0) < (setting.rows or 0):
                times_more = (setting.rows or 0) / (other.rows or 1) - 1
                least.append(needs + 0.9 * self._activations[other] * times_more)
            elif other.rows == setting.rows and (other.kept or 0) < (setting.kept or 0):
                least.append(0.99 * needs)
        least.append(self._between(setting))
        return max(least)

    def _between(self, setting: Setting) -> float:
        """Return what a setting takes between the most and the least layers that keep their activations; 0: unknown."""
        most, least = (Setting(setting.rows, kept) for kept in (self._kept[0], self._kept[-1]))
        if not {most, least} <= self._needs.keys() or most.kept is None or least.kept is None:
            return 0.0
        assert setting.kept is not None
        share = (setting.kept - least.kept) / max(1, most.kept - least.kept)
        return 0.97 * (self._needs[least] + share * (self._needs[most] - self._needs[least]))


def _time_of(kept: int) -> float:
    """Return the time of a step in passes through the layers: forward, two of backward, and what is recomputed."""
    return 3 + 1 - kept / QUARTERS
