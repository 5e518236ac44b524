"""Names of devices that the catalogue does not have, so that none is taken for a misspelt one that it has."""

from __future__ import annotations

import re

_MAKERS = {
    "AMD": r"mi\d{2,3}[a-z]*|radeon.*|instinct.*|rx-?\d{4}.*|gfx\d.*|w\d{4}|strix.*",
    "Apple": r"(apple-)?m[1-9](-?(pro|max|ultra))?|apple.*|mps",
    "Intel": r"gaudi.*|hpu|arc.*|xpu|max-?1[15]\d0",
    "Google": r"tpu.*|v\d[ep]",
    "AWS": r"trainium.*|trn\d.*|inferentia.*|inf\d.*",
    "Huawei": r"ascend.*|npu|910[a-d]",
}
"""Names by their maker."""

_SHARED_MEMORY = r"(dgx-)?spark|gb10|(jetson|agx|drive|orin|thor|xavier).*|tegra.*"
"""NVIDIA's, which share the memory of the host."""

_OTHERS = r"a2|a16|a800.*|h20|h800.*|gh200.*|b100|b300.*|gb[23]00.*|l2|l20|v100s.*|a10m"
"""NVIDIA's, of other rates than the one with the nearest name."""

_MODEL_NUMBER = r"[a-z]{1,2}(\d+)[a-z]?"


def what_it_is(name: str) -> str | None:
    """Return a sentence about a device of another kind than those of the catalogue; None: it may be a misspelt one.

    Args:
        name: lower case, with ``-`` between words.
    """
    name = name.removeprefix("nvidia-")
    for maker, names in _MAKERS.items():
        if re.fullmatch(names, name):
            return f"That is {maker}'s, and only NVIDIA's GPUs with memory of their own are known."
    if re.fullmatch(_SHARED_MEMORY, name):
        return "It shares the host's memory, and only NVIDIA's GPUs with memory of their own are known."
    if re.fullmatch(_OTHERS, name):
        return "It is another product than those with names like it."
    return None


def may_be_misspelt(name: str, known: str) -> bool:
    """Return whether a name may mean that of the catalogue: ``h10`` is no ``h100``, as its number is the product."""
    number = re.fullmatch(_MODEL_NUMBER, name)
    return number is None or number[1] in re.findall(r"\d+", known)
