"""The places that a model and its tokenizer are read from: a folder, a GGUF file or the hub, within reach or not."""

from __future__ import annotations

import struct
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from lowmem_ft.foundation.hub_connection import hub_is_reachable
from lowmem_ft.foundation.user_paths import expand_user
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.files.hub_names import hub_id_of
from lowmem_ft.models.files.local_paths import check_model_path

DAMAGED_GGUF = (struct.error, IndexError, KeyError)
"""Errors of the GGUF readers, in addition to ValueError, for a file that ends early or holds nonsense."""

BY_WHAT_IS_WRITTEN = (StrictDataclassError, ArithmeticError, AttributeError, TypeError, *DAMAGED_GGUF)
"""Errors of transformers, in addition to OSError and ValueError, for odd values in a config's or tokenizer's JSON."""


def source_of(config: ModelConfig) -> dict[str, Any]:
    """Return ``path`` and the keyword arguments to read from it that every ``from_pretrained`` understands.

    Raises:
        ModelError: if it looks like a path and nothing is there.
    """
    check_model_path(config)
    path = expand_user(config.name_or_path or "")
    source: dict[str, Any] = {"trust_remote_code": config.trust_remote_code, "local_files_only": True}
    if path.suffix == ".gguf":
        return source | {"path": str(path.parent), "gguf_file": path.name}
    if config.gguf_file:
        source["gguf_file"] = config.gguf_file
    if path.is_dir():
        return source | {"path": str(path)}
    return source | {
        "path": hub_id_of(config.name_or_path or ""),
        "revision": config.revision or "main",
        "local_files_only": not hub_is_reachable(),
    }


def tokenizer_source(name_or_path: str) -> dict[str, Any]:
    """Return the same for a tokenizer that is named for itself."""
    path = expand_user(name_or_path)
    # Not None, with which transformers would ask on the terminal whether to run code.
    source = {"trust_remote_code": False, "local_files_only": True}
    if path.is_dir():
        return source | {"path": str(path)}
    return source | {"path": hub_id_of(name_or_path), "local_files_only": not hub_is_reachable()}


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error, as a sentence."""
    return str(error).strip().split("\n")[0].rstrip(".") + "."
