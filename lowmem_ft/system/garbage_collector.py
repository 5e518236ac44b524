"""Python's garbage collector, paused while a program makes millions of small objects that are in no cycle."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Collect nothing in a ``with`` block, or in a function that this decorates.

    While a program is traced, tensors are freed with their last reference; a collection at a random moment would only
    cost time. When a trace is extended and replayed, collections that walk all of torch's objects would double the
    time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
