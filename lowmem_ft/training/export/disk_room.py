"""Room on the disk for a new model, checked before anything is written."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.hf_config import load_model_config, other_parts_of, weights_dtype
from lowmem_ft.models.loading import model_of_config
from lowmem_ft.training.export.llama_cpp import GGUF_TYPES

logger = logging.getLogger(__name__)

FREE_SPACE_AND_REPEAT = "Nothing is left of it; free some space, or name a folder on another disk."
"""The way out where a write fails all the same."""

_SMALL_FILES_BYTES = 64 * 2**20
"""Allowance for tokenizer, configs and headers; the largest tokenizer of the catalogue's models takes 33 MB."""

_NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a 4-bit weight: a byte of scale for each 64, and a float32 for each 256 scales (QLoRA, arXiv:2305.14314)."""


def plain_bytes(config: ModelConfig, dtype: str) -> int:
    """Return the bytes of a model's weights in a folder, other parts of its checkpoint included.

    Args:
        config: the model's.
        dtype: type of the weights; ``auto``: the model's own.
    """
    model, itemsize = _on_meta(config), _dtype(config, dtype).itemsize
    parts = other_parts_of(config)
    return model.num_parameters() * itemsize + (0 if parts is None else parts.num_bytes)


def nf4_bytes(config: ModelConfig, dtype: str) -> int:
    """Return the bytes of a model whose linear layers, without the head, are in 4 bits."""
    model, itemsize = _on_meta(config), _dtype(config, dtype).itemsize
    head = model.get_output_embeddings()
    packed = sum(
        part.weight.numel() for part in model.modules() if isinstance(part, nn.Linear) and part is not head
    )
    return int(packed * _NF4_BYTES) + (model.num_parameters() - packed) * itemsize


def gguf_bytes(config: ModelConfig, gguf_type: str) -> int:
    """Return the bytes of a model's GGUF file."""
    return int(_on_meta(config).num_parameters() * GGUF_TYPES[gguf_type])


def require_room(target: Path, needed: Mapping[str, int]) -> None:
    """Refuse to write what the disk has no room for.

    Args:
        target: the folder to be written, or created.
        needed: bytes of each thing that is there at the same time, by what it is.

    Raises:
        UserError: with the numbers.
    """
    existing = next(path for path in (target.absolute(), *target.absolute().parents) if path.exists())
    free, total = shutil.disk_usage(existing).free, sum(needed.values()) + _SMALL_FILES_BYTES
    parts = " and ".join(f"{format_bytes(num_bytes)} for {what}" for what, num_bytes in needed.items())
    if total > free:
        raise UserError(
            f"{target} needs {format_bytes(total)} on its disk ({parts}), and {format_bytes(free)} are free. Free some "
            "space, or name a folder on another disk."
        )
    logger.info("On the disk: %s; %s are free.", parts, format_bytes(free))


def _on_meta(config: ModelConfig) -> PreTrainedModel:
    return model_of_config(config, load_model_config(config), "eager", torch.device("meta"))


def _dtype(config: ModelConfig, dtype: str) -> torch.dtype:
    return weights_dtype(config, load_model_config(config)) if dtype == "auto" else getattr(torch, dtype)
