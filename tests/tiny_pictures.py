"""Models that read images, for training: those of the scripts that are estimated, with their processors and rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from datasets import Dataset

sys.path.append(str(Path(__file__).parents[1] / "scripts" / "user_scripts" / "scripts"))
import seeing_models

FAMILIES = (
    "gemma3",
    "gemma4",
    "idefics3",
    "internvl",
    "llava_onevision",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_5",
)
"""Their losses are means over a step's tokens, or of those of micro-batches, as transformers counts for each."""


def seeing(family: str, *, dtype: torch.dtype = torch.float32, frozen: bool = True) -> tuple[Any, Any]:
    """A model of a family for training, its tower frozen or not, and its processor; the same each time."""
    fields = json.loads(json.dumps(seeing_models.CONFIGS[family]))
    config = hf.CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
    torch.manual_seed(0)
    model = getattr(hf, fields["architectures"][0])(config)
    for name, weight in model.named_parameters():
        if not weight.isfinite().all() or weight.abs().max() > 10:  # some are not initialised
            torch.nn.init.normal_(weight, std=0.02)
        weight.requires_grad_(not (frozen and is_of_tower(name)))
    return model.to(dtype).train(), seeing_models.processor(family)


def is_of_tower(name: str) -> bool:
    """Whether a weight is one of a tower."""
    return any(part in name for part in ("vision", "visual", "audio"))


def picture_rows(num_rows: int = 16) -> Dataset:
    """Chats of several lengths, each about an image of one of several sizes."""
    return Dataset.from_list(seeing_models.rows_with_pictures(num_rows))
