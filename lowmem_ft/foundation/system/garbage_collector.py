"""Python's garbage collector, paused while a program makes millions of small objects that are in no cycle."""

from __future__ import annotations

import contextlib
import gc
import sys
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


@contextlib.contextmanager
def libraries_imported() -> Iterator[None]:
    """Collect nothing in a block that imports torch, and let no later collection walk what the libraries have made.

    Their hundreds of thousands of objects live as long as the process, and walking them again and again took a seventh
    of a first estimate's time. Where torch is there already, this does nothing: what is garbage at the end of the block
    is never freed, and a process in which much has happened may have much of it.
    """
    if "torch" in sys.modules:
        yield
        return
    with collector_paused():
        yield
    gc.freeze()
