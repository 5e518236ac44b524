"""A folder of adapters in PEFT's format: its files' names and its settings, read without torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lowmem_ft.foundation.errors import UserError, did_you_mean, raise_problems

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"


def read_adapter_config(adapter: Path, *, model_folder: str) -> dict[str, Any]:
    """Read the settings of a LoRA adapter.

    Args:
        adapter: its folder.
        model_folder: the name of the folder in which a run saves an adapter.

    Returns:
        The content of ``adapter_config.json``.

    Raises:
        UserError: if a file is missing from the folder, or if the adapter is not LoRA.
    """
    if not adapter.is_dir():
        what = "is a file" if adapter.is_file() else "does not exist"
        neighbours = adapter.parent.iterdir() if adapter.parent.is_dir() else ()
        raise UserError(
            f"An adapter is a folder, and {adapter} {what}.{did_you_mean(adapter.name, (n.name for n in neighbours))} "
            f"A run with adapter.name=lora writes one to its {model_folder}/."
        )
    missing = [name for name in (CONFIG_FILE, WEIGHTS_FILE) if not (adapter / name).is_file()]
    if missing:
        inside = adapter / model_folder
        hint = f" Did you mean {inside}?" if (inside / CONFIG_FILE).is_file() else ""
        raise UserError(
            f"An adapter's folder holds {CONFIG_FILE} and {WEIGHTS_FILE}; {adapter} lacks {' and '.join(missing)}."
            f"{hint} A run with adapter.name=lora writes one to its {model_folder}/."
        )
    try:
        settings = json.loads((adapter / CONFIG_FILE).read_text("utf-8"))
    except ValueError as error:
        raise UserError(f"{adapter / CONFIG_FILE} is not JSON: {error}. Save the adapter again.") from error
    if not isinstance(settings, dict):
        raise UserError(
            f"{adapter / CONFIG_FILE} must hold a JSON object, got {settings!r}. Save the adapter again."
        )
    if settings.get("peft_type") != "LORA":
        raise UserError(
            f"Merging takes LoRA adapters, got {settings.get('peft_type')} in {adapter / CONFIG_FILE}. "
            "Merge it with peft's own merge_and_unload."
        )
    raise_problems(_wrong_settings(settings, adapter / CONFIG_FILE))
    return settings


def _wrong_settings(settings: dict[str, Any], file: Path) -> Iterator[str]:
    """Yield what is wrong with the settings from which PEFT computes."""
    rank, alpha, base = (settings.get(name) for name in ("r", "lora_alpha", "base_model_name_or_path"))
    if "r" in settings and (not isinstance(rank, int) or isinstance(rank, bool) or rank < 1):
        yield f"r in {file} is a whole number from 1, got {rank!r}. Save the adapter again."
    if "lora_alpha" in settings and (not isinstance(alpha, (int, float)) or isinstance(alpha, bool)):
        yield f"lora_alpha in {file} is a number, got {alpha!r}. Save the adapter again."
    if base is not None and not isinstance(base, str):
        yield f"base_model_name_or_path in {file} is text, got {base!r}. Save the adapter again."
