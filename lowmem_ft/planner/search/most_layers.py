"""The most last layers that fit: how many keep their activations, or their weights on the device.

Each such layer costs bytes and saves seconds: with more of them a step never takes less memory or more time, which
``tests/planner/test_automatic_checkpointing.py`` checks against estimates. So the most that fit are the best. All
numbers share a trace (``estimator/traces/repeated_layers.py``), and those after the first cost a small part of it.

They are the last layers, also in models whose layers differ (alternating local and global attention, dense layers
before experts). Backward reaches them first, so their activations are freed before any other layer is recomputed: no
other choice of the same number of identical layers takes less. Where layers alternate, the last n are a mixture of all
kinds; picking one kind would only pay if it saved far more seconds per byte, as with very long rows of global
attention, and every kind of stack would need a knob of its own. Experts after dense layers are the last layers anyway.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

from lowmem_ft.planner.search.estimated_needs import Limits, Need
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.reading.keys import recipe_keys
from lowmem_ft.recipe.space.search_space import with_settings


def with_most_layers(
    recipe: Recipe, keys: Sequence[str], limits: Limits, need_of: Callable[[Recipe], Need]
) -> Need:
    """Return the needs of a recipe with the most last layers that fit.

    Args:
        recipe: with the most layers of each key that could be asked for.
        keys: numbers of last layers; the last one is settled first, as a layer's weights on the device, which spare
            copies in each micro-batch, are worth more than its activations.
        limits: the memory available.
        need_of: estimates a recipe.

    Returns:
        The needs, with those of no such layer, and of one more than fit; if nothing fits, those of no such layer.
    """
    most = {key: recipe_keys()[key].value_in(recipe) for key in keys}
    settled = with_settings(recipe, dict.fromkeys(keys, 0))
    least = found = need_of(settled)
    one_more = None
    for key in reversed(keys) if least.fits else ():

        @functools.cache
        def need_at(number: int, settled: Recipe = settled, key: str = key, fewest: Need = found) -> Need:
            return need_of(with_settings(settled, {key: number})) if number else fewest

        number = most_that_fit(need_at, most[key], limits)
        found, one_more = need_at(number), need_at(number + 1) if number < most[key] else one_more
        settled = with_settings(settled, {key: number})
    return dataclasses.replace(found, least=least, one_more=one_more)


def most_that_fit(need_at: Callable[[int], Need], most: int, limits: Limits) -> int:
    """Return the largest number of layers whose needs fit, as 0 does.

    The first layers may cost nothing, as the peak is elsewhere, and each of the last ones costs most. Linear
    interpolation between the ends of the interval therefore never overestimates, and is tried first; linear
    extrapolation from the last two numbers on either side never underestimates, and is tried next. If neither gives a
    number, the interval is halved.

    Args:
        need_at: returns the needs with a number of layers, and remembers them.
        most: the largest number.
        limits: the memory available.
    """
    if need_at(most).fits:
        return most
    fits, below, beyond, above = 0, 0, most, most
    while beyond - fits > 1:
        sides = [(one, other) for one, other in ((below, fits), (beyond, above)) if one < other]
        told = [_end_of_room(need_at, limits, *side) for side in sides or [(fits, beyond)]]
        ends = [end for end in told if end is not None]
        guess = math.floor(min(ends, default=(fits + beyond) / 2))
        tried = min(max(guess, fits + 1), beyond - 1)
        if need_at(tried).fits:
            below, fits = fits, tried
        else:
            above, beyond = beyond, tried
    return fits


def _end_of_room(need_at: Callable[[int], Need], limits: Limits, fewer: int, more: int) -> float | None:
    """Return the number of layers at which memory ends, by a line through two numbers; or None."""
    room, less = limits.room(need_at(fewer)), limits.room(need_at(more))
    return fewer + room / (room - less) * (more - fewer) if less < room else None
