"""The versions of other libraries that the tests ran with, and one warning if another is used.

Nothing here imports a library: it checks those that the program has imported.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import re
import sys

logger = logging.getLogger(__name__)

TESTED: dict[str, tuple[str, str]] = {
    "torch": ("2.11", "2.15"),
    "transformers": ("5.17", "5.24"),
    "accelerate": ("1.10", "1.15"),
    "peft": ("0.21", "0.21"),
    "bitsandbytes": ("0.50", "0.50"),
    "datasets": ("4.0", "5.2"),
    "trl": ("1.0", "1.16"),
    "liger_kernel": ("0.8.5", "0.8.5"),
}
"""First and last version, by library; patch releases of the last are included. The first is the lower bound in
pyproject.toml. The last is no upper bound there: a newer library often works, and its users get a warning.

Evidence: `make test` with the versions of constraints.txt under Python 3.11. With others all of its tests have run, on
builds of torch for CUDA without a GPU (2026-11-26 to 28), and none failed in the end:

- Python 3.10 (torch 2.13.0, transformers 5.20.2, trl 1.14.2).
- torch 2.14.1 (Triton 3.8.0).
- torch 2.14.1 with transformers 5.24.0, whose Llama 4 with its vision tower (transformers' own class of it) has no
  forward pass: the language part trains, is saved and loads. In addition all causal LMs, eight with FSDP2
  (docs/families.md).
- torch 2.15.0 (Triton 3.9.0).

Some of them have run elsewhere:

- torch 2.11.0 (Triton 3.6.0), transformers 5.17.0, peft 0.21.0, accelerate 1.15.0, Python 3.12 (2026-11-27): on an H200
  the tests that need a GPU; without a GPU those of the virtual GPU, optimizers and techniques, of which some ten fail.
  Estimates of ``accumulation.fusion`` and of TRL's heads need torch 2.13, as its fake ``addmm`` takes ``out_dtype`` for
  another argument; FSDP2 does not shard weights in 4 bits; PEFT's dropout differs in float16.

- transformers 5.17.0, huggingface_hub 1.33.0, torch 2.13.0 (2026-11-27, without a GPU): the tests of models, upstream
  and techniques, and two thirds of those of trainers; none of estimates. One fails: MusicGen is refused by another
  line, as that version cannot read a MusicgenConfig.

At the first versions of all (accelerate 1.10.0, bitsandbytes 0.50.0, datasets 4.0.0), only tests/foundation/upstream.
Not run: the other tests there, most versions in between, and trl 1.0, which cannot be installed together with datasets
4.0.0. Inside a range there is no warning."""

CONTEXT_PARALLEL_IN = ("2.13",)
"""Minor versions of torch whose ``context_parallel``, a prototype, ``tests/training/test_context_parallel.py`` has run.

It ran over gloo with stand-ins for a GPU's kernels (2.13.0, 2026-11-30). Others may cut, exchange or merge in another
way, without an error.
"""

_CONTEXT_PARALLEL = tuple(f"{minor}." for minor in CONTEXT_PARALLEL_IN)
_warned: set[str] = set()
_MINOR = re.compile(r"(\d+)\.(\d+)")


@functools.cache
def installed_version(library: str) -> str | None:
    """Return a version such as ``2.13.0+cpu``; None if the library is not installed."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def unknown_context_parallel() -> str | None:
    """Return the installed version of torch if its ``context_parallel`` was not tested; None if it was, or no torch."""
    version = installed_version("torch")
    return None if version is None or version.startswith(_CONTEXT_PARALLEL) else version


def _is_tested(library: str, version: str) -> bool:
    """Return whether a version is in the tested range of its library; pre-releases count as the release they precede.

    A string that is no version, such as that of a checkout, counts as untested.
    """
    first, last = TESTED[library]
    return re.match(_MINOR, version) is not None and _minor(first) <= _minor(version) <= _minor(last)


def is_before(library: str, version: tuple[int, int]) -> bool:
    """Return whether a release of a library older than this one is installed."""
    found = installed_version(library)
    return found is not None and re.match(_MINOR, found) is not None and _minor(found) < version


def tested_range(library: str) -> str:
    """Return the range in words, such as ``torch 2.11 to 2.15``."""
    first, last = TESTED[library]
    return f"{library} {first}" if first == last else f"{library} {first} to {last}"


def install_tested(library: str) -> str:
    """Return the requirement to give pip for a version in the tested range, such as ``torch>=2.11,<2.15``."""
    first, last = TESTED[library]
    major, minor = _minor(last)
    return f"{library}>={first},<{major}.{minor + 1}"


def warn_if_untested() -> None:
    """Warn once per process about imported libraries whose version was not tested.

    Call this at the start of an estimate or a training run, in the process that speaks: numbers may be off, or a patch
    may not find its place.
    """
    others = []
    for library in sorted((TESTED.keys() & sys.modules.keys()) - _warned):
        version = installed_version(library)
        if version is not None and not _is_tested(library, version):
            _warned.add(library)
            others.append(f"{library} {version} (tested: {tested_range(library)})")
    if others:
        logger.warning(
            "Not tested with this version: %s. Estimates may be off and training may fail there; "
            "`pip install` of a tested version is the safe way.",
            ", ".join(others),
        )


def _minor(version: str) -> tuple[int, int]:
    numbers = re.match(_MINOR, version)
    assert numbers is not None, version
    return int(numbers[1]), int(numbers[2])
