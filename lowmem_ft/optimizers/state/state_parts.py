"""State saved in other parts than it is to be kept in: one process's elements, out of all that was saved.

State that is kept element by element is split and joined exactly. 8-bit codes share a scale in blocks of 256, which
restart in each process's part: where the blocks of the saved parts are those of the requested part, or continue in it,
codes and scales are taken as they are; else they are read to float32, to be rounded at random to new codes, which moves
a value by at most ``(|value| + floor * scale) / 8`` once more (see :class:`BlockwiseState`), without bias.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowmem_ft.optimizers.formats.operators import BLOCK
from lowmem_ft.optimizers.formats.state_formats import BlockwiseState, StateFormat, state_format
from lowmem_ft.optimizers.table import StateFormats, format_of


@dataclass(frozen=True)
class StateParts:
    """A flat tensor that was saved in parts.

    Args:
        parts: in their order, the number of each one's first element in the whole, and the part, a slice of which is a
            tensor, read on demand.
        lengths: lengths of the parts.
    """

    parts: Sequence[tuple[int, Any]]
    lengths: Sequence[int]

    def overlapping(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the parts that hold elements from ``start`` to before ``stop``, and these elements' range in each.

        Yields:
            Number of the part, its first element in question, and the one after the last.
        """
        for number, ((first, _), length) in enumerate(zip(self.parts, self.lengths, strict=True)):
            begin, end = max(start, first), min(stop, first + length)
            if begin < end:
                yield number, begin - first, end - first

    def between(self, start: int, stop: int) -> Tensor:
        """Return the elements from ``start`` to before ``stop``."""
        read = [
            self.parts[number][1][begin:end].reshape(-1)
            for number, begin, end in self.overlapping(start, stop)
        ]
        if not read:
            _, values = self.parts[0]
            return values[:0].reshape(-1)
        return torch.cat(read) if len(read) > 1 else read[0]


def state_here(
    values: Mapping[str, Tensor | StateParts],
    averages: Mapping[str, StateFormat],
    saved_as: StateFormats,
    start: int,
    stop: int,
) -> tuple[dict[str, Tensor | StateParts], StateFormats]:
    """Return the saved state of a parameter's elements from ``start`` to before ``stop``.

    Args:
        values: by the keys of ``optimizer.state``; a tensor holds all of it.
        averages: the parameter's running averages, in whatever format they are kept here.
        saved_as: the format that they were saved in, or formats by their names.
        start: first element, of the flattened whole.
        stop: the one after the last.

    Returns:
        By the same keys, flat tensors; and the formats that the averages are in: ``saved_as``, or ``fp32`` in place of
        8 bits if blocks begin at other places.

    Raises:
        KeyError: if a tensor of that format is missing.
    """
    parts = {key: _in_parts(value) for key, value in values.items()}
    scales = {
        f"{name}_scale": name
        for name, form in averages.items()
        if isinstance(state_format(format_of(saved_as, name), signed=form.signed), BlockwiseState)
    }
    codes = set(scales.values())
    here: dict[str, Tensor | StateParts] = {
        key: value.between(start, stop) for key, value in parts.items() if key not in codes | scales.keys()
    }
    goes_on = all(_blocks_go_on(parts[name], start, stop) for name in codes)
    for scale, name in scales.items():
        if goes_on:
            here[name] = parts[name].between(start, stop)
            here[scale] = _scales_between(parts[name], parts[scale], start, stop)
        else:
            form = state_format("8bit", signed=averages[name].signed)
            here[name] = _read_between(form, name, parts[name], parts[scale], start, stop)
    if goes_on:
        return here, saved_as
    return here, {name: "fp32" if name in codes else format_of(saved_as, name) for name in averages}


def _in_parts(value: Tensor | StateParts) -> StateParts:
    return value if isinstance(value, StateParts) else StateParts([(0, value)], [value.numel()])


def _blocks_go_on(codes: StateParts, start: int, stop: int) -> bool:
    """Return whether blocks counted from ``start`` are blocks of the parts, except a last one that ends early."""
    return all(
        (codes.parts[number][0] + begin - start) % BLOCK == 0 and begin % BLOCK == 0
        for number, begin, _ in codes.overlapping(start, stop)
    )


def _scales_between(codes: StateParts, scales: StateParts, start: int, stop: int) -> Tensor:
    read = [
        scales.parts[number][1][begin // BLOCK : -(-end // BLOCK)]
        for number, begin, end in codes.overlapping(start, stop)
    ]
    return torch.cat(read) if read else scales.parts[0][1][:0]


def _read_between(
    form: StateFormat, name: str, codes: StateParts, scales: StateParts, start: int, stop: int
) -> Tensor:
    """Return the values in float32."""
    read = []
    for number, begin, end in codes.overlapping(start, stop):
        block = begin - begin % BLOCK
        kept = {
            name: codes.parts[number][1][block:end],
            f"{name}_scale": scales.parts[number][1][block // BLOCK : -(-end // BLOCK)],
        }
        read.append(form.read(kept, name, end - block)[begin - block :])
    return torch.cat(read)
