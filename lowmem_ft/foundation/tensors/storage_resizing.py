"""Hook on ``untyped_storage().resize_(n)``, by which FSDP2 and others free live tensors' memory: it is no operator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lowmem_ft.foundation.upstream.patches import existing, replace

OnResized = Callable[[torch.UntypedStorage], None]


@contextlib.contextmanager
def storage_resizes_seen(on_resized: OnResized) -> Iterator[None]:
    """Call a function, in a ``with`` block, after each change of a storage's size.

    Args:
        on_resized: receives the storage.
    """
    inner = existing(torch.UntypedStorage, "resize_")

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = inner(storage, size)
        on_resized(storage)
        return result

    with contextlib.ExitStack() as undo:
        replace(undo, torch.UntypedStorage, "resize_", resize)
        yield


def storage_resized_by(func: Any, args: tuple[Any, ...], result: Any) -> torch.Tensor | None:
    """Return the tensor whose storage an operator has resized without returning it, as Inductor's own does.

    Args:
        func: the operator, which has run.
        args: its arguments.
        result: what it returned.
    """
    return args[0] if result is None and func._opname == "resize_storage_bytes_" else None
