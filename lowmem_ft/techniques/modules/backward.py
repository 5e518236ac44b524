"""Whether a module's forward is the model's, or a part of it computed again for backward."""

from __future__ import annotations

import torch


def is_in_backward() -> bool:
    """Whether a backward pass runs: a forward within it is a recomputation."""
    return torch._C._current_graph_task_id() != -1
