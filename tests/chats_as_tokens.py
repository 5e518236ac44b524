"""The chats of the recipe ``tiny`` as rows of tokens, as a user's own program would write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_models import TINY
from transformers import AutoTokenizer

from lowmem_ft.data.config import DataConfig
from lowmem_ft.data.loading import load_data


def token_rows() -> list[dict[str, Any]]:
    """The chats in their order, with the labels that the recipe learns."""
    data = load_data(
        DataConfig(path=str(TINY / "data.jsonl")),
        AutoTokenizer.from_pretrained(TINY),
        max_positions=None,
        seed=0,
        attn_implementation="sdpa",
    )
    return [
        {"input_ids": row.input_ids_T.tolist(), "labels": row.labels_T.tolist()}
        for row in data.train.head(1000)
    ]


def write_tokens(file: Path) -> str:
    """Write the rows as JSON lines; return the setting that names them."""
    file.write_text("".join(json.dumps(row) + "\n" for row in token_rows()))
    return f"data={file}"
