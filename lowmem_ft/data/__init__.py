"""Training data, from files or the hub to the micro-batches of an optimizer step.

Names resolve on first use, so that reading a recipe (which needs only ``DataConfig``) does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowmem_ft.foundation.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lowmem_ft.data.batches.batch import Batch, LabelledRows, merged
    from lowmem_ft.data.batches.collating import Collator
    from lowmem_ft.data.batches.position import DataPosition
    from lowmem_ft.data.batches.row import IGNORED_LABEL
    from lowmem_ft.data.batches.splitting import half_of, half_of_rows, pieces
    from lowmem_ft.data.batches.stream import DataStream, Window, eval_batches
    from lowmem_ft.data.config import DataConfig
    from lowmem_ft.data.loading import PreparedData, load_data
    from lowmem_ft.data.summary import DataSummary

__all__ = [
    "IGNORED_LABEL",
    "Batch",
    "Collator",
    "DataConfig",
    "DataPosition",
    "DataStream",
    "DataSummary",
    "LabelledRows",
    "PreparedData",
    "Window",
    "eval_batches",
    "half_of",
    "half_of_rows",
    "load_data",
    "merged",
    "pieces",
]

__getattr__ = lazy_exports(__name__)
