"""The combinations of a space as a search takes them: numbers in arrays, with what orders and what bounds them.

Axes: N combinations, D dimensions, U different choices of the dimensions that something reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from lowmem_ft.catalog.gpu import Gpu
from lowmem_ft.memory.uncertainty import TIGHT_SHARE
from lowmem_ft.planner import bounds
from lowmem_ft.planner.ranking import Prior
from lowmem_ft.planner.search import Candidates
from lowmem_ft.planner.space import ROWS, Rule, Space, asks_consent, with_settings
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.keys import recipe_keys

Ints = NDArray[np.int64]

_LESS_A_STEP = 0.3
"""What the next value of a knob is expected to take off the logarithm of what moves, before anything is known."""

_POWER_OF_ROWS = 0.5
"""Of the rows of a micro-batch, with which what moves is expected to grow: not all of it does."""

_SECONDS_A_CHANGE = 0.05
"""And what a value with a cost is expected to add to that of the seconds."""


def candidates_of(space: Space, shape: bounds.ModelShape, gpu: Gpu | None) -> Candidates:
    """All combinations of a space, with their order and their bounds.

    Args:
        space: at least one combination.
        shape: of the model.
        gpu: where it would be trained; None: a processor, of which no bounds are known.

    Returns:
        The candidates, in the order of the space.
    """
    choices_ND = np.array(space.combinations, dtype=np.int64).reshape(len(space.combinations), -1)

    def each(keys: Sequence[str], of: Callable[[Recipe], float]) -> NDArray[np.float64]:
        if gpu is None:
            return np.zeros(len(choices_ND))
        return _by_what_is_read(space, choices_ND, keys, of)

    at_end_N = each(bounds.BYTES_KEYS, lambda recipe: bounds.bytes_after_backward(recipe, shape, _known(gpu)))
    in_between_N = each(
        bounds.BYTES_KEYS, lambda recipe: bounds.bytes_before_backward(recipe, shape, _known(gpu))
    )
    activations_N = each(bounds.ACTIVATION_KEYS, lambda recipe: bounds.activation_bytes(recipe, shape))
    before_N, after_N = _ranks(space, choices_ND)
    return Candidates(
        choices_ND=choices_ND,
        before_N=before_N,
        after_N=after_N,
        seconds_N=each(bounds.SECONDS_KEYS, lambda recipe: bounds.seconds(recipe, shape, _known(gpu))),
        device_bytes_N=with_headroom(np.maximum(at_end_N, in_between_N + activations_N)),
        host_bytes_N=with_headroom(each(bounds.BYTES_KEYS, lambda recipe: bounds.host_bytes(recipe, shape))),
    )


_Bytes = TypeVar("_Bytes", float, NDArray[np.float64])


def with_headroom(num_bytes: _Bytes) -> _Bytes:
    """The smallest limit under which so many bytes are not tight."""
    return num_bytes / (1 - TIGHT_SHARE)


def prior_of(space: Space) -> Prior:
    """What is expected of each choice: less memory in the order of the knob's values, more time where it costs some."""
    less, slower = [], []
    for place, dimension in enumerate(space.dimensions):
        is_rows = dimension.keys == ROWS
        less.append(
            tuple(
                _POWER_OF_ROWS * float(np.log(choice[ROWS[0]])) if is_rows else -_LESS_A_STEP * index
                for index, choice in enumerate(dimension.choices)
            )
        )
        slower.append(
            tuple(
                _SECONDS_A_CHANGE * (space.price(place, index)[1] > 0)
                for index in range(len(dimension.choices))
            )
        )
    flat = Prior.flat(tuple(len(dimension.choices) for dimension in space.dimensions))
    return Prior(seconds=tuple(slower), device_bytes=tuple(less), host_bytes=flat.host_bytes)


def _known(gpu: Gpu | None) -> Gpu:
    assert gpu is not None, "asked for on a GPU only"
    return gpu


def _ranks(space: Space, choices_ND: Ints) -> tuple[Ints, Ints]:
    """What decides before the seconds, and what where they are equal; the second is unique."""
    given_up = [
        place
        for place, dimension in enumerate(space.dimensions)
        if any(asks_consent(recipe_keys()[key]) for key in dimension.keys)
    ]
    before_N = np.zeros(len(choices_ND), dtype=np.int64)
    if given_up and space.recipe.plan.allow:
        read_UD, inverse_N = np.unique(choices_ND[:, given_up], axis=0, return_inverse=True)
        own = list(space.own)
        tuples = [space.given_up(tuple(_filled(own, given_up, read))) for read in read_UD.tolist()]
        rank = {value: index for index, value in enumerate(sorted(set(tuples)))}
        before_N = np.array([rank[value] for value in tuples])[inverse_N.reshape(-1)]
    prices = [
        np.array([space.price(place, index) for index in range(len(dimension.choices))])[choices_ND[:, place]]
        for place, dimension in enumerate(space.dimensions)
    ]
    if not prices:
        return before_N, np.arange(len(choices_ND))
    rounding_N, cost_N = (
        np.max([price[:, 0] for price in prices], 0),
        np.max([price[:, 1] for price in prices], 0),
    )
    changes_N = np.sum([price[:, 2] for price in prices], axis=0)
    order = np.lexsort((np.arange(len(choices_ND)), changes_N, cost_N, rounding_N))
    after_N = np.empty(len(order), dtype=np.int64)
    after_N[order] = np.arange(len(order))
    return before_N, after_N


def _filled(own: list[int], places: Sequence[int], values: Sequence[int]) -> list[int]:
    filled = list(own)
    for place, value in zip(places, values, strict=True):
        filled[place] = value
    return filled


def _by_what_is_read(
    space: Space, choices_ND: Ints, keys: Sequence[str], of: Callable[[Recipe], float]
) -> NDArray[np.float64]:
    """A number for each combination, computed once for those that differ in nothing it reads."""
    reader = Rule(keys=tuple(keys), problems=lambda recipe: ())
    places = [
        place
        for place, dimension in enumerate(space.dimensions)
        if any(reader.reads(key) for key in dimension.keys)
    ]
    if not places:
        return np.full(len(choices_ND), of(space.recipe))
    read_UD, inverse_N = np.unique(choices_ND[:, places], axis=0, return_inverse=True)
    values = []
    for read in read_UD.tolist():
        settings: dict[str, Any] = {}
        for place, index in zip(places, read, strict=True):
            settings |= space.dimensions[place].choices[index]
        values.append(of(with_settings(space.recipe, settings)))
    return np.array(values)[inverse_N.reshape(-1)]
