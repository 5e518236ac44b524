"""The version of torch, for rules of its CUDA kernels that depend on it."""

from __future__ import annotations

import torch

TORCH_VERSION: tuple[int, int] = (
    int(torch.__version__.split(".")[0]),
    int(torch.__version__.split(".")[1]),
)
"""Major and minor version, such as (2, 13)."""
