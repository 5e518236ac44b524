"""Detection of a backward pass, and so of a recomputation: whether a forward is the model's own, or runs again."""

from __future__ import annotations

import torch


def is_in_backward() -> bool:
    """Return whether a backward pass is running: a forward within it is a recomputation."""
    return torch._C._current_graph_task_id() != -1
