"""The combinations of a search space as arrays: their bounds, and what orders them.

Axes: N combinations, D dimensions, U distinct choices of the dimensions that are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.memory.least_memory import PARTS, Held, Part, StepParts
from lowmem_ft.foundation.memory.uncertainty import with_headroom
from lowmem_ft.foundation.system.process_size import LIBRARIES_BYTES
from lowmem_ft.planning.planner import bounds, expectations
from lowmem_ft.planning.planner.search.estimated_needs import Limits
from lowmem_ft.planning.planner.search.ranking import Prior, Quantity, weights_of
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.reading.keys import recipe_keys
from lowmem_ft.recipe.rules.rule import reads
from lowmem_ft.recipe.space.search_space import Space, asks_consent, with_settings

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LEAST_EFFECT = 0.003
"""Share of the expected bytes or seconds by which a choice that matters changes them."""

Bytes = tuple[float, float]
"""Bytes of the device and of the host."""


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """The combinations to choose from.

    Args:
        choices_ND: the index of a choice for each dimension.
        before_N: decides before the seconds do; smaller is better.
        after_N: decides between equal seconds; smaller is better; no two are equal.
        changes_N: how much it changes: the less, the simpler it is.
        seconds_N: lower bound of a step's seconds.
        device_bytes_N: lower bound of the device bytes.
        host_bytes_N: lower bound of the host bytes.
    """

    choices_ND: Ints
    before_N: Ints
    after_N: Ints
    changes_N: Ints
    seconds_N: Floats
    device_bytes_N: Floats
    host_bytes_N: Floats

    def __len__(self) -> int:
        return len(self.choices_ND)

    def may_fit(self, limits: Limits) -> Bools:
        """Return which of them may fit, by their bounds."""
        is_beyond = (self.device_bytes_N > limits.device_bytes) | (self.host_bytes_N > limits.host_bytes)
        return ~is_beyond

    def least_missing(self, limits: Limits) -> float:
        """Return the least device and host bytes missing, by bounds, of the combination that lacks the fewest."""
        over_N = np.maximum(0.0, self.device_bytes_N - limits.device_bytes)
        return float((over_N + np.maximum(0.0, self.host_bytes_N - limits.host_bytes)).min())


def candidates_of(space: Space, shape: bounds.ModelShape, gpu: Gpu | None) -> Candidates:
    """Return all combinations of a search space, with their order and their bounds.

    Args:
        space: at least one combination.
        shape: the model's sizes.
        gpu: the training device; None: a processor, which has no known bounds.

    Returns:
        The candidates, in the order of the space.
    """
    choices_ND = np.array(space.combinations, dtype=np.int64).reshape(len(space.combinations), -1)
    nothing_N = np.zeros(len(choices_ND))
    seconds_N = device_bytes_N = host_bytes_N = nothing_N
    if gpu is not None:
        unknown = [key.path for key in bounds.unknown_knobs()]
        # As many layers as fit take at least the bytes of the fewest, and the seconds of the most.
        parts, least_parts = (_parts(each, choices_ND, shape) for each in (space, space.with_fewest_layers))
        (products_N,) = _by_what_is_read(
            space,
            choices_ND,
            [*bounds.PRODUCT_KEYS, *unknown],
            lambda recipe: (bounds.product_seconds(recipe, shape, gpu),),
        )
        seconds_N = np.maximum(products_N, bounds.link_seconds(parts, gpu))
        device_bytes_N = bounds.device_bytes(least_parts, gpu) + nothing_N
        host_bytes_N = np.minimum(bounds.host_bytes(parts), bounds.host_bytes(least_parts)) + nothing_N
    given_up_N, price_N = _ranks(space, choices_ND)
    return Candidates(
        choices_ND=choices_ND,
        before_N=given_up_N,
        after_N=price_N,
        changes_N=_complexities(space, choices_ND),
        seconds_N=seconds_N,
        device_bytes_N=with_headroom(device_bytes_N),
        host_bytes_N=with_headroom(host_bytes_N),
    )


def _parts(space: Space, choices_ND: Ints, shape: bounds.ModelShape) -> StepParts:
    """Return :func:`bounds.parts_of` all combinations, as arrays."""
    return {part: _held(space, choices_ND, part, shape) for part in PARTS}


def _held(space: Space, choices_ND: Ints, part: Part, shape: bounds.ModelShape) -> Held:
    """Return what each combination leaves of a part, as arrays."""
    statements = bounds.statements_of(part)
    rows = _by_what_is_read(
        space,
        choices_ND,
        [key.path for key, _ in statements],
        lambda recipe: bounds.held_of(part, recipe, shape, statements),
    )
    return Held(*rows)


def prior_of(
    space: Space, candidates: Candidates, limits: Limits, shape: bounds.ModelShape, gpu: Gpu | None
) -> Prior:
    """Return the expected needs of each combination that may fit; a processor has no timing model: bytes alone.

    Where one takes as many last layers as fit, the bytes are those of the fewest, which decide whether it fits, and the
    seconds are of as many as the other bytes should leave room for.
    """
    places = np.flatnonzero(candidates.may_fit(limits))
    most_4M, fewest_4M = (
        _expected(each, candidates.choices_ND, places, shape, gpu)
        for each in (space, space.with_fewest_layers)
    )
    room_M, more_M = limits.device_bytes - fewest_4M[0], most_4M[0] - fewest_4M[0]
    share_M = np.clip(np.where(more_M > 0, room_M / np.maximum(more_M, 1.0), 1.0), 0.0, 1.0)
    device_N, host_N, seconds_N, effort_N = np.zeros((4, len(candidates)))
    device_N[places], host_N[places], _, effort_N[places] = fewest_4M
    seconds_N[places] = fewest_4M[2] + share_M * (most_4M[2] - fewest_4M[2])
    expected: dict[Quantity, tuple[NDArray[np.float64], NDArray[np.float64]]] = {
        "device_bytes": (device_N, candidates.device_bytes_N),
        "effort": (effort_N, np.zeros(len(candidates))),
    }
    if gpu is not None:
        expected["host_bytes"] = host_N, candidates.host_bytes_N
        expected["seconds"] = seconds_N, candidates.seconds_N
    matters_D = _matters(candidates.choices_ND[places], np.vstack([device_N, host_N, seconds_N])[:, places])
    return Prior.flat(len(candidates)).expecting(expected, matters_D)


def _matters(choices_MD: Ints, expected_3M: Floats) -> Bools:
    """Return for each dimension whether anything is expected to change with it.

    It does not if there are combinations that differ in it alone, and none of them are expected to differ in their
    needs.
    """
    weights_D = weights_of(choices_MD)
    number_M, matters_D = choices_MD @ weights_D, np.ones(len(weights_D), bool)
    for place, weight in enumerate(weights_D):
        others_M = number_M - choices_MD[:, place] * weight
        order = np.argsort(others_M, kind="stable")
        starts = np.flatnonzero(np.diff(others_M[order], prepend=-1))
        if len(starts) < len(order):
            least_3G, most_3G = (
                reduce.reduceat(expected_3M[:, order], starts, axis=1) for reduce in (np.minimum, np.maximum)
            )
            matters_D[place] = bool((most_3G - least_3G > LEAST_EFFECT * most_3G).any())
    return matters_D


def _expected(
    space: Space, choices_ND: Ints, places: Ints, shape: bounds.ModelShape, gpu: Gpu | None
) -> NDArray[np.float64]:
    """Return the expected device bytes, host bytes, seconds and effort of some combinations, one row each."""
    parts_N: Mapping[Part, Any] = _parts(space, choices_ND, shape)
    expected_4M = np.empty((4, len(places)))
    first_U, inverse_M = _distinct(space, choices_ND[places], expectations.READ_KEYS)
    order, ends = np.argsort(inverse_M, kind="stable"), np.cumsum(np.bincount(inverse_M))
    for first, start, end in zip(first_U, [0, *ends[:-1]], ends, strict=True) if len(ends) else ():
        alike = order[start:end]
        recipe = space.recipe_of(space.combinations[places[first]])
        parts: dict[Part, Any] = {
            part: Held(*[cast(Any, np.asarray(of_N)[places[alike]]) for of_N in held])
            for part, held in parts_N.items()
        }
        seconds = 0.0 if gpu is None else expectations.seconds(recipe, shape, parts, gpu)
        bytes_ = _expected_bytes(recipe, shape, parts, gpu)
        for row, value in enumerate((*bytes_, seconds, expectations.effort(recipe))):
            expected_4M[row, alike] = value
    return expected_4M


def _distinct(space: Space, choices_ND: Ints, keys: Sequence[str]) -> tuple[Ints, Ints]:
    """Return the first of the combinations with each distinct value of some keys, and which of these each one has."""
    places = _places_of(space, keys)
    number_N = choices_ND[:, places] @ weights_of(choices_ND[:, places])
    _, first_U, inverse_N = np.unique(number_N, return_index=True, return_inverse=True)
    return first_U, inverse_N.reshape(-1)


def _places_of(space: Space, keys: Sequence[str]) -> list[int]:
    """Return the dimensions that set some of the keys or groups."""
    reader = reads(*keys)(lambda recipe: ())
    return [
        place
        for place, dimension in enumerate(space.dimensions)
        if any(reader.reads(key) for key in dimension.keys)
    ]


def expected_bytes(recipe: Recipe, shape: bounds.ModelShape, gpu: Gpu | None) -> Bytes:
    """Return the expected bytes with headroom: on the host the bound, which leaves out little.

    On a processor, where host and device are the same, the host's are 0.
    """
    return _expected_bytes(recipe, shape, bounds.parts_of(recipe, shape), gpu)


def _expected_bytes(recipe: Recipe, shape: bounds.ModelShape, parts: StepParts, gpu: Gpu | None) -> Bytes:
    context_bytes = LIBRARIES_BYTES if gpu is None else gpu.context_bytes
    host = 0.0 if gpu is None else bounds.host_bytes(parts)
    return with_headroom(context_bytes + expectations.device_bytes(recipe, shape, parts)), with_headroom(host)


def _ranks(space: Space, choices_ND: Ints) -> tuple[Ints, Ints]:
    """Return the rank that decides before the seconds, and the one that breaks ties; the second is unique."""
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


def _complexities(space: Space, choices_ND: Ints) -> Ints:
    """Return :meth:`Space.complexity` of each combination."""
    total_N = np.zeros(len(choices_ND), dtype=np.int64)
    for place, dimension in enumerate(space.dimensions):
        prices = [space.price(place, index) for index in range(len(dimension.choices))]
        total_N += np.array([is_changed * (1 + cost) for _, cost, is_changed in prices])[choices_ND[:, place]]
    return total_N


def _filled(own: list[int], places: Sequence[int], values: Sequence[int]) -> list[int]:
    filled = list(own)
    for place, value in zip(places, values, strict=True):
        filled[place] = value
    return filled


def _by_what_is_read(
    space: Space, choices_ND: Ints, keys: Sequence[str], of: Callable[[Recipe], Sequence[float]]
) -> NDArray[np.float64]:
    """Return numbers for each combination, one row per number, computed once per distinct value of the keys read."""
    places = _places_of(space, keys)
    first_U, inverse_N = _distinct(space, choices_ND, keys)
    values = []
    for read in choices_ND[first_U][:, places].tolist():
        settings: dict[str, Any] = {}
        for place, index in zip(places, read, strict=True):
            settings |= space.dimensions[place].choices[index]
        values.append(of(with_settings(space.recipe, settings)))
    return np.array(values).T[:, inverse_N]
