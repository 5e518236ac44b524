"""The settings of PyTorch's CUDA caching allocator, as ``PYTORCH_CUDA_ALLOC_CONF`` gives them."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lowmem_ft.foundation.allocator_setting import allocator_variable
from lowmem_ft.foundation.errors import UserError, did_you_mean
from lowmem_ft.foundation.units import MIB

logger = logging.getLogger(__name__)

NUM_ROUNDUP_INTERVALS = 16


@dataclass(frozen=True, kw_only=True)
class AllocatorConfig:
    """Settings by which the caching allocator divides a device's memory. The defaults are PyTorch's.

    Args:
        expandable_segments: one growing address range for each pool and stream, instead of one segment per allocation.
        large_segment_size_bytes: size of the segments that requests between 1 and 10 MiB share.
        max_split_size_bytes: blocks of this size and above are never split; None: all may be.
        max_non_split_rounding_bytes: an unsplittable block may exceed a request by less than this; None: the large
            segment size.
        roundup_power2_divisions: number of parts into which each interval between powers of two is divided, and to
            which sizes are rounded up; the first entry is for sizes below 2 MiB, the next for 2 to 4 MiB, the last for
            32 GiB and above; 0 or 1 turns an interval off.
        garbage_collection_threshold: share of the allocator's cap above which cached segments that have long been
            idle are given back before new ones are taken; 0: never. Without a cap it does nothing.

    Source: c10/core/AllocatorConfig.h of PyTorch 2.13.
    """

    expandable_segments: bool = False
    large_segment_size_bytes: int = 20 * MIB
    max_split_size_bytes: int | None = None
    max_non_split_rounding_bytes: int | None = None
    roundup_power2_divisions: tuple[int, ...] = (0,) * NUM_ROUNDUP_INTERVALS
    garbage_collection_threshold: float = 0.0

    @classmethod
    def parse(cls, text: str) -> AllocatorConfig:
        """Parse a ``PYTORCH_CUDA_ALLOC_CONF`` (or ``PYTORCH_ALLOC_CONF``) string.

        Args:
            text: such as ``expandable_segments:True,roundup_power2_divisions:[256:1,512:2,>:8]``; empty: the defaults.

        Returns:
            The settings. Keys that do not change a run's device memory are accepted, and logged.

        Raises:
            UserError: with every key that is unknown, malformed, out of range or not modelled.
        """
        variable = allocator_variable() or "PYTORCH_CUDA_ALLOC_CONF"
        fields: dict[str, Any] = {}
        problems: list[str] = []
        ignored: list[str] = []
        text = re.sub(r"\s", "", text).removesuffix(",")
        for item in re.split(r",(?![^\[]*\])", text) if text else ():
            key, _, value = item.partition(":")
            if key in _KEYS_WITHOUT_EFFECT.split() or item == "backend:native":
                ignored.append(key)
            elif key not in _READERS:
                meant = did_you_mean(key, (*_READERS, *_KEYS_WITHOUT_EFFECT.split()))
                problems.append(f"{variable} has no key `{key}`.{meant}")
            else:
                field, read, rule = _READERS[key]
                try:
                    fields[field] = read(value)
                except ValueError:
                    problems.append(f"{variable}: {key} is {rule}; got `{item}`.")
        least = fields.get("large_segment_size_bytes", cls.large_segment_size_bytes)
        for key in ("max_split_size", "max_non_split_rounding"):
            if fields.get(f"{key}_bytes", least) < least:
                problems.append(
                    f"{variable}: {key}_mb is at least {least // MIB}, as large_segment_size_mb is."
                )
        if problems:
            raise UserError(*problems)
        if ignored:
            logger.info("Device memory does not depend on these allocator settings: %s.", ", ".join(ignored))
        return cls(**fields)

    def roundup_divisions(self, size_bytes: int) -> int:
        """Return the number of parts into which a size's interval between powers of two is divided."""
        interval = size_bytes.bit_length() - MIB.bit_length()
        return self.roundup_power2_divisions[min(max(interval, 0), NUM_ROUNDUP_INTERVALS - 1)]


_KEYS_WITHOUT_EFFECT = (
    "graph_capture_record_stream_reuse pinned_free_catch_all pinned_max_cached_size_mb pinned_max_round_threshold_mb "
    "pinned_num_register_threads pinned_reserve_segment_size_mb pinned_use_background_threads "
    "pinned_use_cuda_host_register pinned_use_hip_host_register release_lock_on_cudamalloc release_lock_on_hipmalloc "
    "throw_on_cudamalloc_oom"
)


def _bytes_from(least_mib: int) -> Callable[[str], int]:
    def read(value: str) -> int:
        if int(value) < least_mib:
            raise ValueError(value)
        return int(value) * MIB

    return read


def _truth(value: str) -> bool:
    return bool(("False", "True").index(value))


def _share(value: str) -> float:
    if not 0 < float(value) < 1:
        raise ValueError(value)
    return float(value)


def _divisions(value: str) -> tuple[int, ...]:
    """Parse as PyTorch does: a list's first size also covers all below it, ``>`` all above the last one."""
    if value[:1] + value[-1:] != "[]":
        return (_power_of_two(value),) * NUM_ROUNDUP_INTERVALS
    divisions = [0] * NUM_ROUNDUP_INTERVALS
    last: int | None = None
    for item in value[1:-1].split(","):
        size, _, parts = item.partition(":")
        number = 0 if parts == "0" else _power_of_two(parts)
        if size == ">":
            above = (last or 0) + 1  # sizes below 2 MiB stay as they are even if `>` is the only item
            divisions[above:] = [number] * (NUM_ROUNDUP_INTERVALS - above)
            continue
        interval = min(_power_of_two(size).bit_length() - 1, NUM_ROUNDUP_INTERVALS - 1)
        if last is None:
            divisions[:interval] = [number] * interval
        divisions[interval] = number
        last = interval
    return tuple(divisions)


def _power_of_two(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number.bit_count() != 1:
        raise ValueError(text)
    return number


def _refused(value: str) -> None:
    raise ValueError(value)


_READERS: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "large_segment_size_mb": (
        "large_segment_size_bytes",
        _bytes_from(11),
        "a whole number of MiB, at least 11",
    ),
    "max_split_size_mb": ("max_split_size_bytes", _bytes_from(20), "a whole number of MiB, at least 20"),
    "max_non_split_rounding_mb": (
        "max_non_split_rounding_bytes",
        _bytes_from(20),
        "a whole number of MiB, at least 20",
    ),
    "roundup_power2_divisions": (
        "roundup_power2_divisions",
        _divisions,
        "a power of two, or a list of MiB:divisions in powers of two such as [256:1,512:2,>:8]",
    ),
    "garbage_collection_threshold": (
        "garbage_collection_threshold",
        _share,
        "between 0 and 1, both excluded",
    ),
    "expandable_segments": ("expandable_segments", _truth, "True or False"),
    "backend": ("", _refused, "native: only PyTorch's own allocator is modelled"),
    "per_process_memory_fraction": ("", _refused, "not read: set a size, such as budget.device=24GiB"),
}
"""Keys that change device memory: the field, what reads a value or raises ValueError, and what a value must be."""
