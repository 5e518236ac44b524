"""Traces as columns of numbers and a table of words, for files without pickle."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowmem_ft.foundation.memory.memory_estimate import ModelSize
from lowmem_ft.foundation.memory.timeline import Allocation, Event, Timeline
from lowmem_ft.virtual_gpu.calls.trace import Trace
from lowmem_ft.virtual_gpu.calls.work import Work
from lowmem_ft.virtual_gpu.replay.depth.layer_extrapolation import GrowingSize, GrowingWork, Repetition
from lowmem_ft.virtual_gpu.replay.depth.layer_passes import Layers

Arrays = Mapping[str, NDArray[Any]]

_EVENT_KINDS = ("malloc", "free", "empty_cache")
_HEADER = "header"

_ALLOCATION_WORDS = tuple(one.name for one in dataclasses.fields(Allocation) if one.name != "size_bytes")
_WORK_NUMBERS = ("position", "flops", "num_bytes")
_WORK_WORDS = tuple(one.name for one in dataclasses.fields(Work) if one.name not in _WORK_NUMBERS)


def arrays_of(trace: Trace, repetition: Repetition | None, **notes: Any) -> dict[str, NDArray[Any]]:
    """Return a trace, and the repetition proved with it, as arrays.

    Args:
        trace: the trace to keep.
        repetition: how deeper models follow from it; None: the trace has all layers.
        notes: JSON values to keep with it.

    Returns:
        Arrays for ``numpy.savez``; :func:`trace_of` reads them.
    """
    allocations, events, work = trace.timeline.allocations, trace.timeline.events, trace.work
    allocation_words, allocation_codes = _encoded(allocations, _ALLOCATION_WORDS)
    work_words, work_codes = _encoded(work, _WORK_WORDS)
    header = {
        "allocation_words": allocation_words,
        "work_words": work_words,
        "trace": {
            "model": dataclasses.asdict(trace.model),
            "is_quantized": trace.is_quantized,
            "choices": trace.choices,
            "assumed_largest": trace.assumed_largest,
            "does_routing_decide": trace.does_routing_decide,
        },
        "repetition": None if repetition is None else _repetition_as_json(repetition),
        "notes": notes,
    }
    arrays = {
        _HEADER: np.frombuffer(json.dumps(header).encode(), np.uint8),
        "allocations": allocation_codes,
        "sizes": np.array([allocation.size_bytes for allocation in allocations], np.int64),
        "event_kinds": np.array([_EVENT_KINDS.index(event.kind) for event in events], np.uint8),
        "event_allocations": np.array([event.allocation for event in events], np.int64),
        "work": work_codes,
        **{name: np.array([getattr(entry, name) for entry in work], np.int64) for name in _WORK_NUMBERS},
    }
    if repetition is not None:
        arrays |= {"is_relative": repetition.is_relative, "goes_with": repetition.goes_with}
    return arrays


def trace_of(arrays: Arrays) -> tuple[Trace, Repetition | None, dict[str, Any]]:
    """Rebuild the arguments of the :func:`arrays_of` call that returned ``arrays``.

    Raises:
        KeyError, TypeError, ValueError, IndexError: if the arrays are not from :func:`arrays_of`.
    """
    header = json.loads(arrays[_HEADER].tobytes())
    words = [dict(zip(_ALLOCATION_WORDS, each, strict=True)) for each in header["allocation_words"]]
    allocations = [
        Allocation(size_bytes=size, **words[code])
        for code, size in zip(arrays["allocations"].tolist(), arrays["sizes"].tolist(), strict=True)
    ]
    kinds = map(_EVENT_KINDS.__getitem__, arrays["event_kinds"].tolist())
    events = list(map(Event, kinds, arrays["event_allocations"].tolist()))
    words = [_work_words(dict(zip(_WORK_WORDS, each, strict=True))) for each in header["work_words"]]
    columns = [arrays[name].tolist() for name in _WORK_NUMBERS]
    work = [
        Work(position=position, flops=flops, num_bytes=num_bytes, **words[code])
        for code, position, flops, num_bytes in zip(arrays["work"].tolist(), *columns, strict=True)
    ]
    of_trace = header["trace"]
    trace = Trace(
        timeline=Timeline(allocations, events),
        work=work,
        model=ModelSize(**of_trace["model"]),
        is_quantized=of_trace["is_quantized"],
        choices=tuple(of_trace["choices"]),
        assumed_largest=tuple(of_trace["assumed_largest"]),
        does_routing_decide=of_trace["does_routing_decide"],
    )
    return trace, _repetition_of(header["repetition"], arrays), header["notes"]


def _encoded(items: Iterable[Any], names: Sequence[str]) -> tuple[list[tuple[Any, ...]], NDArray[np.int64]]:
    """Return the distinct values of some attributes of the items, and for each item their index."""
    places: dict[tuple[Any, ...], int] = {}
    codes = [places.setdefault(tuple(getattr(item, name) for name in names), len(places)) for item in items]
    return list(places), np.array(codes, np.int64)


def _repetition_as_json(repetition: Repetition) -> dict[str, Any]:
    return {
        "layers": dataclasses.asdict(repetition.layers),
        "structure": repetition.structure,
        "sizes": [[birth, *size] for birth, size in repetition.sizes.items()],
        "work": [
            [
                birth,
                work.costs,
                work.more,
                [
                    [position, [dataclasses.asdict(entry) for entry in added]]
                    for position, added in work.added
                ],
            ]
            for birth, work in repetition.work.items()
        ],
        "parameters": repetition.parameters,
    }


def _repetition_of(header: Any, arrays: Arrays) -> Repetition | None:
    if header is None:
        return None
    parameters, trainable_parameters = header["parameters"]
    return Repetition(
        layers=Layers(**header["layers"] | {"tails": _tuples(header["layers"]["tails"])}),
        structure=header["structure"],
        is_relative=arrays["is_relative"],
        goes_with=arrays["goes_with"],
        sizes={birth: GrowingSize(*size) for birth, *size in header["sizes"]},
        work={
            birth: GrowingWork(
                costs=_tuples(costs),
                more=_tuples(more),
                added=tuple(
                    (position, tuple(Work(**_work_words(each)) for each in entries))
                    for position, entries in added
                ),
            )
            for birth, costs, more, added in header["work"]
        },
        parameters=(parameters, trainable_parameters),
    )


def _work_words(words: dict[str, Any]) -> dict[str, Any]:
    """Return an entry's words as they were before JSON made lists of tuples."""
    return words | {"shape": tuple(words["shape"])}


def _tuples(values: Iterable[Iterable[float]]) -> tuple[Any, ...]:
    return tuple(map(tuple, values))
