"""Detection of recomputation: whether a module's forward is the model's own, or runs again for backward."""

from __future__ import annotations

import torch


def is_in_backward() -> bool:
    """Return whether a backward pass is running: a forward within it is a recomputation."""
    return torch._C._current_graph_task_id() != -1
