"""Checks of a model's and tokenizer's local paths, apart from reading them, so that errors precede torch's import."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.foundation.user_paths import address_problem, expand_user, neighbours
from lowmem_ft.models.config import ModelConfig

GGUF_MAGIC = b"GGUF"
_GGUF_HEADER_BYTES = 24
"""Bytes of magic, version, and the numbers of tensors and of metadata entries."""

_LATEST_GGUF = 3
_LEAST_BYTES_OF_AN_ENTRY = 13
"""Minimum bytes of an entry: the length of its name, its type, and a value of one byte."""

_LOOKED_AT_BYTES = 256

_CHECKPOINT = re.compile(r"checkpoint-\d+")

_OF_A_TOKENIZER = ("tokenizer", "vocab", "spiece", "sentencepiece", "merges")
"""Prefixes of the names of files that a tokenizer is read from."""


def check_model_path(config: ModelConfig) -> None:
    """Reject a model's path that is no folder and no GGUF file; a hub id passes.

    Raises:
        ModelError: if it looks like a path and there is no model there.
    """
    name = config.name_or_path or ""
    if problem := address_problem("model.name_or_path", name):
        raise ModelError(problem)
    path = expand_user(name)
    if config.revision is not None and path.exists():
        raise ModelError(
            f"model.revision={config.revision} applies to a hub repository, but model.name_or_path={name} is on this "
            "machine. Set model.revision=null."
        )
    if path.suffix == ".gguf":
        _require_gguf(path, f"model.name_or_path={name}")
    elif path.is_dir():
        if config.gguf_file:
            _require_gguf(path / config.gguf_file, f"model.gguf_file={config.gguf_file}")
        elif not (path / "config.json").is_file():
            is_adapter = (path / "adapter_config.json").is_file()
            merge = shlex.join(["lowmem-ft", "merge", name, "DIR"])
            hint = f" It is an adapter: `{merge}` merges it into its base model." if is_adapter else ""
            raise ModelError(
                f"A model folder holds config.json and *.safetensors; model.name_or_path={name} has no "
                f"config.json.{hint} Pass another folder, a .gguf file, or a hub id such as Qwen/Qwen2.5-7B."
            )
    elif path.is_file() or looks_like_a_path(name):
        _refuse_deleted_checkpoint(path)
        raise ModelError(
            f"model.name_or_path={name} is not a folder.{neighbours(path)} Pass a folder with config.json and "
            "*.safetensors, a .gguf file, or a hub id such as Qwen/Qwen2.5-7B."
        )


def _refuse_deleted_checkpoint(path: Path) -> None:
    """Say that a run has deleted a checkpoint, as it does with its older ones while it trains."""
    newer = [one.name for one in path.parent.glob("checkpoint-*") if _CHECKPOINT.fullmatch(one.name)]
    if _CHECKPOINT.fullmatch(path.name) and newer and not path.is_symlink():
        raise ModelError(
            f"{path} is not there any more: a run keeps training.save_total_limit checkpoints, and deletes older ones "
            f"while it trains. Name {path.parent / max(newer, key=lambda name: int(name[11:]))}, or the run's folder "
            "again."
        )


def check_tokenizer_path(config: ModelConfig) -> None:
    """Reject a tokenizer's path that is no folder with a tokenizer in it; hub ids and GGUF files pass.

    Raises:
        ModelError: if it looks like a path and no folder is there, or a folder holds no file of a tokenizer, or a
            damaged one.
    """
    name = config.tokenizer_name_or_path or ""
    if problem := address_problem("model.tokenizer_name_or_path", name):
        raise ModelError(problem)
    path = expand_user(name or config.name_or_path or "")
    if path.is_dir() and (name or not config.gguf_file):
        if not any(file.name.startswith(_OF_A_TOKENIZER) for file in path.iterdir()):
            raise not_a_tokenizer(path, "it holds no tokenizer.json.")
        _refuse_damaged_tokenizer(path)
    elif name and (path.is_file() or looks_like_a_path(name)):
        raise ModelError(
            f"model.tokenizer_name_or_path={name} is not a folder.{neighbours(path)} Pass a folder with "
            "tokenizer.json, or a hub id."
        )


def not_a_tokenizer(path: str | Path, reason: str) -> ModelError:
    """Return the error for a place that no tokenizer can be read from."""
    return ModelError(
        f"No tokenizer could be read from {path}: {reason} "
        "Set model.tokenizer_name_or_path to a folder or hub id that has one."
    )


def _refuse_damaged_tokenizer(folder: Path) -> None:
    """Reject a truncated tokenizer.json by its two ends: it can have many megabytes."""
    whole, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if whole.is_file():
        with whole.open("rb") as raw:
            begin = raw.read(_LOOKED_AT_BYTES)
            raw.seek(-min(_LOOKED_AT_BYTES, whole.stat().st_size), os.SEEK_END)
            end = raw.read()
        if not begin.lstrip().startswith(b"{") or not end.rstrip().endswith(b"}"):
            raise not_a_tokenizer(folder, "its tokenizer.json is truncated, or not a JSON object.")
        if b'"' not in begin:
            raise not_a_tokenizer(folder, "its tokenizer.json is an empty JSON object.")
    if settings.is_file():
        try:
            is_object = isinstance(json.loads(settings.read_text("utf-8")), dict)
        except ValueError:
            is_object = False
        if not is_object:
            raise not_a_tokenizer(folder, "its tokenizer_config.json is not a JSON object.")


def looks_like_a_path(name: str) -> bool:
    """Return whether a name cannot be a hub id."""
    return name.startswith((".", "/", "~", "\\")) or name.count("/") > 1


def _require_gguf(file: Path, setting: str) -> None:
    if not file.is_file():
        raise ModelError(f"{setting}: there is no such file.{neighbours(file)} Correct the path.")
    with file.open("rb") as raw:
        begin = raw.read(_GGUF_HEADER_BYTES)
    if not begin.startswith(GGUF_MAGIC):
        raise ModelError(
            f"{setting} is not a GGUF file, which begins with GGUF; got {begin[:8]!r}. Download it again, or name "
            "another."
        )
    if len(begin) < _GGUF_HEADER_BYTES:
        raise ModelError(f"{setting} ends after {len(begin)} bytes, within its header. Download it again.")
    if not 0 < int.from_bytes(begin[4:8], "little") <= _LATEST_GGUF:
        raise ModelError(
            f"{setting} is a damaged GGUF file, or has a newer version: GGUF has versions 1 to {_LATEST_GGUF}, got "
            f"{int.from_bytes(begin[4:8], 'little')}. Download it again."
        )
    counts = [int.from_bytes(begin[start : start + 8], "little") for start in (8, 16)]
    if sum(counts) * _LEAST_BYTES_OF_AN_ENTRY > file.stat().st_size:
        raise ModelError(
            f"{setting} is a damaged GGUF file, or ends early: its header lists {counts[0]:,} tensors and "
            f"{counts[1]:,} metadata entries, which its {file.stat().st_size:,} bytes cannot hold. Download it again."
        )
