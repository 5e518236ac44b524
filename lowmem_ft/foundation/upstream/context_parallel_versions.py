"""The versions of torch whose ``context_parallel``, a prototype, is known to train as one process does."""

from __future__ import annotations

import re

from lowmem_ft.foundation.upstream.tested import installed_version

CONTEXT_PARALLEL_IN = ("2.13",)
"""Minor versions of torch on which ``tests/training/test_context_parallel.py`` has run, over gloo with stand-ins for a
GPU's kernels (2.13.0, 2026-11-30). Others may cut, exchange or merge in another way, without an error."""


def unknown_context_parallel() -> str | None:
    """Return the installed version of torch if it is another one; None if it is known, or there is no torch."""
    version = installed_version("torch")
    if version is None:
        return None
    minor = re.match(r"\d+\.\d+", version)
    return None if minor is not None and minor[0] in CONTEXT_PARALLEL_IN else version
