"""The settings of PyTorch's CUDA caching allocator, as ``PYTORCH_CUDA_ALLOC_CONF`` gives them."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator
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
        return _Parser().parse(text)

    def roundup_divisions(self, size_bytes: int) -> int:
        """Return the number of parts into which a size's interval between powers of two is divided."""
        interval = size_bytes.bit_length() - MIB.bit_length()
        return self.roundup_power2_divisions[min(max(interval, 0), NUM_ROUNDUP_INTERVALS - 1)]


_EFFECTIVE_KEYS = (
    "large_segment_size_mb",  # first, as upstream reads it: the bounds of the next two depend on it
    "max_split_size_mb",
    "max_non_split_rounding_mb",
    "roundup_power2_divisions",
    "garbage_collection_threshold",
    "expandable_segments",
    "backend",
    "per_process_memory_fraction",
)

_KEYS_WITHOUT_EFFECT = (
    "graph_capture_record_stream_reuse pinned_free_catch_all pinned_max_cached_size_mb pinned_max_round_threshold_mb "
    "pinned_num_register_threads pinned_reserve_segment_size_mb pinned_use_background_threads "
    "pinned_use_cuda_host_register pinned_use_hip_host_register release_lock_on_cudamalloc release_lock_on_hipmalloc "
    "throw_on_cudamalloc_oom"
)


class _Parser:
    """Parses one string, and collects all its problems to report them at once."""

    def __init__(self) -> None:
        self._problems: list[str] = []
        self._fields: dict[str, Any] = {}
        self._variable = allocator_variable() or "PYTORCH_CUDA_ALLOC_CONF"
        self._large_segment_mb = AllocatorConfig.large_segment_size_bytes // MIB

    def parse(self, text: str) -> AllocatorConfig:
        settings = dict(self._settings(re.sub(r"\s", "", text)))
        for key in _EFFECTIVE_KEYS:
            if key in settings:
                getattr(self, f"_read_{key}")(settings[key])
        if self._problems:
            raise UserError(*self._problems)
        ignored = sorted(settings.keys() & set(_KEYS_WITHOUT_EFFECT.split()))
        if ignored:
            logger.info("Device memory does not depend on these allocator settings: %s.", ", ".join(ignored))
        return AllocatorConfig(**self._fields)

    def _settings(self, text: str) -> Iterator[tuple[str, str]]:
        for item in re.split(r",(?![^\[]*\])", text.removesuffix(",")) if text else ():
            key, colon, value = item.partition(":")
            if not (key and colon and value):
                self._reject(
                    "settings are written key:value and separated by commas", item, "expandable_segments:True"
                )
            elif key in _EFFECTIVE_KEYS or key in _KEYS_WITHOUT_EFFECT.split():
                yield key, value
            else:
                meant = did_you_mean(key, (*_EFFECTIVE_KEYS, *_KEYS_WITHOUT_EFFECT.split()))
                self._problems.append(f"{self._variable} has no key `{key}`.{meant}")

    def _read_large_segment_size_mb(self, value: str) -> None:
        megabytes = self._megabytes("large_segment_size_mb", value, minimum=11)
        if megabytes is not None:
            self._large_segment_mb = megabytes
            self._fields["large_segment_size_bytes"] = megabytes * MIB

    def _read_max_split_size_mb(self, value: str) -> None:
        megabytes = self._megabytes("max_split_size_mb", value, minimum=self._large_segment_mb)
        if megabytes is not None:
            self._fields["max_split_size_bytes"] = megabytes * MIB

    def _read_max_non_split_rounding_mb(self, value: str) -> None:
        megabytes = self._megabytes("max_non_split_rounding_mb", value, minimum=self._large_segment_mb)
        if megabytes is not None:
            self._fields["max_non_split_rounding_bytes"] = megabytes * MIB

    def _read_roundup_power2_divisions(self, value: str) -> None:
        if value.startswith("[") and value.endswith("]"):
            divisions = _divisions_by_interval(value[1:-1])
        else:
            number = _power_of_two(value)
            divisions = None if number is None else (number,) * NUM_ROUNDUP_INTERVALS
        if divisions is None:
            self._reject(
                "roundup_power2_divisions is a power of two, or a list of MiB:divisions in powers of two "
                "that may end with >:divisions",
                value,
                "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
            )
        else:
            self._fields["roundup_power2_divisions"] = divisions

    def _read_garbage_collection_threshold(self, value: str) -> None:
        try:
            threshold = float(value)
        except ValueError:
            threshold = math.nan
        if 0 < threshold < 1:
            self._fields["garbage_collection_threshold"] = threshold
        else:
            rule = "garbage_collection_threshold is between 0 and 1, both excluded"
            self._reject(rule, value, "garbage_collection_threshold:0.8")

    def _read_expandable_segments(self, value: str) -> None:
        if value in ("True", "False"):
            self._fields["expandable_segments"] = value == "True"
        else:
            self._reject("expandable_segments is True or False", value, "expandable_segments:True")

    def _read_backend(self, value: str) -> None:
        if value == "cudaMallocAsync":
            self._reject(
                "only PyTorch's native allocator is modelled", "backend:cudaMallocAsync", "backend:native"
            )
        elif value != "native":
            self._reject("backend is native or cudaMallocAsync", value, "backend:native")

    def _read_per_process_memory_fraction(self, value: str) -> None:
        given = f"per_process_memory_fraction:{value}"
        self._reject(
            "the allocator's cap is a size and is set in the recipe", given, "budget.device=24GiB instead"
        )

    def _megabytes(self, key: str, value: str, minimum: int) -> int | None:
        if value.isdecimal() and int(value) >= minimum:
            return int(value)
        self._reject(
            f"{key} is a whole number of MiB, at least {minimum}", value, f"{key}:{max(minimum, 128)}"
        )
        return None

    def _reject(self, rule: str, given: str, example: str) -> None:
        self._problems.append(f"{self._variable}: {rule}; got `{given}`. Write {example}.")


def _divisions_by_interval(items: str) -> tuple[int, ...] | None:
    """Parse the list form as PyTorch does: the first size also covers all below it, ``>`` all above the last one."""
    divisions = [0] * NUM_ROUNDUP_INTERVALS
    last: int | None = None
    for item in items.split(","):
        size, _, value = item.partition(":")
        number = 0 if value == "0" else _power_of_two(value)
        if number is None:
            return None
        if size == ">":
            above = (last or 0) + 1  # sizes below 2 MiB stay as they are even if `>` is the only item
            divisions[above:] = [number] * (NUM_ROUNDUP_INTERVALS - above)
            continue
        megabytes = _power_of_two(size)
        if megabytes is None:
            return None
        interval = min(megabytes.bit_length() - 1, NUM_ROUNDUP_INTERVALS - 1)
        if last is None:
            divisions[:interval] = [number] * interval
        divisions[interval] = number
        last = interval
    return tuple(divisions)


def _power_of_two(text: str) -> int | None:
    number = int(text) if text.isdecimal() else 0
    return number if number.bit_count() == 1 else None
