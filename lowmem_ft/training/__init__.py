"""Training of a recipe: one step for real runs and traces, a loop around it, checkpoints that resume bit for bit.

Names resolve on first use, so that reading a run's folder does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowmem_ft.foundation.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lowmem_ft.training.loop import TrainResult, train

__all__ = ["TrainResult", "train"]

__getattr__ = lazy_exports(__name__)
