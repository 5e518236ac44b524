"""Python's garbage collector, while millions of small objects are made that no cycle holds."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Collect nothing in a ``with`` block, or in a function that this decorates.

    While a program is traced, tensors go with their last reference; a collection at a random moment would only cost
    time. Where a trace is extended and replayed, collections that walk all of torch's objects take as long again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
