"""The most last layers that fit: how many keep their activations, or their weights on the device.

Each such layer costs bytes and saves seconds: with more of them a step never takes less memory or more time, which
``tests/planning/planner/test_automatic_checkpointing.py`` checks against estimates. So the most that fit are the best.
Most numbers share a trace (``planning/estimator/traces/repeated_layers.py``), and those after the first cost a small
part of it; so a search begins where the memory is expected to end, and not with none or all of them, which have traces
of their own.

They are the last layers, also in models whose layers differ (alternating local and global attention, dense layers
before experts). Backward reaches them first, so their activations are freed before any other layer is recomputed: no
other choice of the same number of identical layers takes less. Where layers alternate, the last n are a mixture of all
kinds; picking one kind would only pay if it saved far more seconds per byte, as with very long rows of global
attention, and every kind of stack would need a knob of its own. Experts after dense layers are the last layers anyway.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from lowmem_ft.planning.estimator.most_that_fits import MostThatFits
from lowmem_ft.planning.planner.search.estimated_needs import Limits, Need
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.reading.keys import recipe_keys
from lowmem_ft.recipe.space.search_space import with_settings


def with_most_layers(
    recipe: Recipe,
    keys: Sequence[str],
    limits: Limits,
    need_of: Callable[[Recipe], Need],
    expected_bytes: Callable[[Recipe], float],
) -> Need:
    """Return the needs of a recipe with the most last layers that fit.

    Args:
        recipe: with the most layers of each key that could be asked for.
        keys: numbers of last layers; the last one is settled first, as a layer's weights on the device, which spare
            copies in each micro-batch, are worth more than its activations.
        limits: the memory available.
        need_of: estimates a recipe.
        expected_bytes: returns the device bytes that a recipe is expected to need; they decide where to begin.

    Returns:
        The needs, with those of one layer more; if nothing fits, the needs without such layers.
    """
    settled, one_more = with_settings(recipe, dict.fromkeys(keys, 0)), None
    found: Need | None = None
    least: Need | None = None
    for key in reversed(keys):
        most = recipe_keys()[key].value_in(recipe)
        expected = [expected_bytes(with_settings(settled, {key: number})) for number in (0, most)]
        layers = _MostLayers(
            need_at=lambda number, settled=settled, key=key: need_of(with_settings(settled, {key: number})),
            most=most,
            limits=limits,
            expected=(expected[0], (expected[1] - expected[0]) / max(1, most)),
        )
        number = layers.find() or 0
        found, least = layers.answers[number], least or layers.least()
        if not found.fits:
            break
        settled = with_settings(settled, {key: number})
        if number < most:
            more = with_settings(settled, {key: number + 1})
            one_more = dataclasses.replace(layers.needed(number + 1), recipe=more)
    assert found is not None, "there is a key"
    return dataclasses.replace(found, least=least, one_more=one_more)


class _MostLayers(MostThatFits[Need]):
    """The search for the largest number of layers whose needs fit.

    Args:
        need_at: estimates a number of layers.
        most: the largest number.
        limits: the memory available.
        expected: device bytes expected without such layers, and for each of them.
    """

    def __init__(
        self, need_at: Callable[[int], Need], most: int, limits: Limits, expected: tuple[float, float]
    ) -> None:
        super().__init__(need_at, limits.room, (0, most), self._expected_end)
        self._limits, self._expected = limits, expected

    def least(self) -> Need:
        """Return the needs without such layers, by a line through the fewest that were estimated."""
        first, *others = sorted(self.answers)
        if first and not others:
            need, (_, each) = self.answers[first], self._expected
            return dataclasses.replace(need, device_bytes=need.device_bytes - first * each)
        return self._on_a_line(first, others[0], 0) if first else self.answers[0]

    def needed(self, number: int) -> Need:
        """Return the needs of one layer more than fit: as estimated, or the least, which do not fit either."""
        return self.answers.get(number) or dataclasses.replace(
            self._on_a_line(self.fitting[-2], self.fitting[-1], number), fits=False, estimate=None
        )

    def _expected_end(self, known: tuple[int, float] | None) -> float:
        """Predict how many layers fit, from the expected bytes of each layer and one estimate if there is one."""
        none, each = self._expected
        number, room = known or (0, self._limits.device_bytes - none)
        if each <= 0:
            return self._most if room >= 0 else 0
        return number + room / each

    def _on_a_line(self, one: int, other: int, number: int) -> Need:
        """Return the needs of a number by a line through those of two others."""
        need, further = self.answers[one], self.answers[other]
        share = (number - one) / (other - one)
        return dataclasses.replace(
            need,
            seconds=need.seconds + share * (further.seconds - need.seconds),
            device_bytes=need.device_bytes + share * (further.device_bytes - need.device_bytes),
            host_bytes=need.host_bytes + share * (further.host_bytes - need.host_bytes),
        )
