"""The version of torch, where a rule of its CUDA kernels depends on it."""

from __future__ import annotations

import torch

TORCH_VERSION: tuple[int, int] = (
    int(torch.__version__.split(".")[0]),
    int(torch.__version__.split(".")[1]),
)
"""Such as (2, 13)."""
