"""The GPUs of the catalogue: hardware in ``gpus.json``, prices in ``prices.json``, one price list per entry.

The shares of the hardware's rates that programs reach are in ``clock_rates.json``.

JSON, since the standard library reads it on every Python we support; replacing a price list touches no GPU.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType
from typing import Any

from lowmem_ft.foundation.catalog.clock_rates import rates_of_estimates
from lowmem_ft.foundation.catalog.gpu_spec import Gpu, Price
from lowmem_ft.foundation.errors import UserError, did_you_mean
from lowmem_ft.foundation.units import MIB

ALL_GPUS = "all"
"""The word for every GPU of the catalogue."""
CPU = "cpu"
"""The word for this machine's processor."""

_OTHER_MAKERS = {
    "AMD": r"mi\d{2,3}[a-z]*|radeon.*|instinct.*|rx-?\d{4}.*|gfx\d.*|w\d{4}|strix.*",
    "Apple": r"(apple-)?m[1-9](-?(pro|max|ultra))?|apple.*|mps",
    "Intel": r"gaudi.*|hpu|arc.*|xpu|max-?1[15]\d0",
    "Google": r"tpu.*|v\d[ep]",
    "AWS": r"trainium.*|trn\d.*|inferentia.*|inf\d.*",
    "Huawei": r"ascend.*|npu|910[a-d]",
}
"""Devices that are not NVIDIA's, by their maker."""

_SHARED_MEMORY = r"(dgx-)?spark|gb10|(jetson|agx|drive|orin|thor|xavier).*|tegra.*"
"""NVIDIA's devices that share the memory of the host."""

_UNLISTED = r"a2|a16|a800.*|h20|h800.*|gh200.*|b100|b300.*|gb[23]00.*|l2|l20|v100s.*|a10m"
"""NVIDIA's GPUs that are not in the catalogue, and differ from the one with the nearest name."""

_MODEL_NUMBER = r"[a-z]{1,2}(\d+)[a-z]?"


@functools.cache
def load_gpus() -> Mapping[str, Gpu]:
    """Return every GPU of the catalogue by its name, smallest memory first."""
    price_lists = _read("prices.json")
    gpus = [_gpu(name, row, price_lists) for name, row in _read("gpus.json").items()]
    gpus.sort(key=lambda gpu: (gpu.memory_bytes, gpu.name))
    return MappingProxyType({gpu.name: gpu for gpu in gpus})


def find_gpu(name: str) -> Gpu:
    """Return the GPU of a name such as ``rtx-4090`` or of its driver's name; case, blanks and ``_`` do not matter.

    Raises:
        UserError: if the catalogue has no such GPU; the message names the nearest.
    """
    if not isinstance(name, str):
        raise UserError(f"A GPU is named as in the catalogue, such as 'rtx-4090', got {name!r}. Pass a name.")
    gpus = load_gpus()
    key = _plain(name)
    found = gpus.get(key) or next((gpu for gpu in gpus.values() if _plain(gpu.full_name) == key), None)
    if found is None:
        one = _without_number(key)
        if one in gpus:
            count = "".join(re.findall(r"\d+", key.replace(one, "", 1)))
            raise UserError(
                f"One GPU is expected here, got {name}. Ask for {one}; `lowmem-ft estimate` and `lowmem-ft plan` take "
                f"several, such as --gpu {count}x{one}."
            )
        raise UserError(
            f"There is no GPU {name!r} in the catalogue.{_nearest(key, one, gpus)} `lowmem-ft gpus` lists all "
            f"{len(gpus)}."
        )
    return found


def _nearest(key: str, one: str, gpus: Mapping[str, Gpu]) -> str:
    """Return what a name that the catalogue does not have may mean, or what else it is and the way out."""
    if (other := _unlisted_device(one)) is not None:
        return f" {other} For memory alone, give its size in place of a name, such as budget=96GiB."
    for asked in (key, one):
        if near := did_you_mean(
            asked, [known for known in gpus if asked in known and _may_be_misspelt(one, known)]
        ):
            return near
    return did_you_mean(key, [known for known in gpus if _may_be_misspelt(one, known)])


def gpu_word(word: str) -> str:
    """Return a word that names devices without blanks around it; ``All`` and ``CPU`` in lower case."""
    word = word.strip()
    return word.lower() if word.lower() in (ALL_GPUS, CPU) else word


def split_count(name: str) -> tuple[int | None, str]:
    """Split ``8xrtx-4090`` into 8 and ``rtx-4090``; any other name into None and itself.

    Raises:
        UserError: if the part before the x is not a number of GPUs, or no GPU name follows it.
    """
    found = re.fullmatch(r"([-+.,/\d]*?)-?x-?(\D.*)?", _plain(name))
    if found is None:
        return None, name
    count, gpu = found[1], found[2] or ""
    if not gpu and count:
        raise UserError(f"--gpu names a GPU after the number and the x, got {name}. Write {name}rtx-4090.")
    if re.fullmatch(r"\d{1,4}", count) and int(count) >= 1:
        return int(count), gpu
    if gpu not in load_gpus():
        return None, name
    raise UserError(
        f"--gpu takes a whole number of GPUs before the x, from 1 to 9999, got {count or 'none'} in {name}. Ask for "
        f"{gpu}, or for 2x{gpu}."
    )


def _without_number(key: str) -> str:
    """Return ``h100-80gb`` for ``4xh100-80gb`` and ``h100-80gbx4``."""
    return re.sub(r"^\d{1,2}-?[x*]-?|-?[x*]-?\d{1,2}$", "", key)


def _plain(name: str) -> str:
    return name.strip().lower().replace(" ", "-").replace("_", "-")


def _read(file: str) -> Any:
    return json.loads((resources.files("lowmem_ft.foundation.catalog") / file).read_text(encoding="utf-8"))


def _gpu(name: str, row: Mapping[str, Any], price_lists: list[dict[str, Any]]) -> Gpu:
    major, minor = row["compute_capability"]
    return Gpu(
        name=name,
        full_name=row["full_name"],
        memory_bytes=row["memory_mib"] * MIB,
        nvidia_smi_bytes=row["nvidia_smi_mib"] * MIB,
        compute_capability=(major, minor),
        num_multiprocessors=row["multiprocessors"],
        dense_flops={dtype: rate * 1e12 for dtype, rate in row["dense_tflops"].items()},
        bandwidth=row["bandwidth_gb_per_s"] * 1e9,
        pcie_generation=row["pcie"]["generation"],
        pcie_lanes=row["pcie"]["lanes"],
        context_bytes=row["context_mib"] * MIB,
        context_is_estimate=row.get("context_is_estimate", True),
        nvlink=row.get("nvlink_gb_per_s", 0) * 1e9,
        rates=rates_of_estimates(name, (major, minor)),
        prices=tuple(
            Price(
                provider=price_list["provider"],
                usd_per_hour=price_list["usd_per_hour"][name],
                date=price_list["date"],
                source=price_list["source"],
            )
            for price_list in price_lists
            if name in price_list["usd_per_hour"]
        ),
        sources=row["sources"],
    )


def _unlisted_device(name: str) -> str | None:
    """Return a sentence about a known device that the catalogue does not list; None: the name may be misspelt.

    Args:
        name: lower case, with ``-`` between words.
    """
    name = name.removeprefix("nvidia-")
    for maker, names in _OTHER_MAKERS.items():
        if re.fullmatch(names, name):
            return f"That is {maker}'s, and only NVIDIA's GPUs with memory of their own are known."
    if re.fullmatch(_SHARED_MEMORY, name):
        return "It shares the host's memory, and only NVIDIA's GPUs with memory of their own are known."
    if re.fullmatch(_UNLISTED, name):
        return "It is another product than those with names like it."
    return None


def _may_be_misspelt(name: str, known: str) -> bool:
    """Return whether a name may mean that of the catalogue: ``h10`` is no ``h100``, as its number is the product."""
    number = re.fullmatch(_MODEL_NUMBER, name)
    return number is None or number[1] in re.findall(r"\d+", known)
