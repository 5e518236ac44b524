"""Adapters of a language model in files that fit the whole model around it, whose names differ."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from safetensors.torch import load_file, save_file
from torch import Tensor

from lowmem_ft.techniques.adapters.adapter_folder import CONFIG_FILE, WEIGHTS_FILE

_PREFIX = "base_model.model."
"""PEFT puts this before the name of every module."""


class WholeModel(Protocol):
    """A model of several parts, as ``models/other_parts.py`` describes it."""

    def in_whole(self, name: str) -> str:
        """Return the whole model's name for one of the language model."""
        ...

    def in_language_model(self, name: str) -> str | None:
        """Return the language model's name for one of the whole; None: it belongs to another part."""
        ...

    def layers(self) -> Sequence[str]:
        """Return the names of the linear layers of the other parts."""
        ...


def name_for_whole(folder: Path, whole: WholeModel) -> None:
    """Rename, in place, what a saved adapter of the language model names: its tensors, target modules and parameters.

    The targets become one pattern: by their short names PEFT would find layers of the other parts, too.
    """
    tensors = load_file(folder / WEIGHTS_FILE)
    renamed = {_renamed(name, whole.in_whole): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / WEIGHTS_FILE, {"format": "pt"})
    settings = json.loads((folder / CONFIG_FILE).read_text("utf-8"))
    targets = sorted(re.escape(whole.in_whole(target)) for target in settings["target_modules"] or ())
    if parameters := settings.get("target_parameters"):
        settings["target_parameters"] = [whole.in_whole(name) for name in parameters]
    body = re.escape(whole.in_whole("model."))
    settings["target_modules"] = rf"(?={body})(?:.*\.)?(?:{'|'.join(targets)})"
    (folder / CONFIG_FILE).write_text(json.dumps(settings, indent=2), "utf-8")


def named_for_language_model(tensors: Mapping[str, Tensor], whole: WholeModel) -> dict[str, Tensor]:
    """Return an adapter's tensors by the names that they have in the language model."""
    return {
        _renamed(name, lambda own: whole.in_language_model(own) or own): tensor
        for name, tensor in tensors.items()
    }


@contextlib.contextmanager
def for_language_model(folder: Path, whole: WholeModel | None) -> Iterator[Path]:
    """Yield an adapter's folder that fits the language model: a temporary copy if ``folder`` is for the whole."""
    if whole is None:
        yield folder
        return
    with tempfile.TemporaryDirectory() as copy:
        tensors = named_for_language_model(load_file(folder / WEIGHTS_FILE), whole)
        save_file(tensors, Path(copy, WEIGHTS_FILE), {"format": "pt"})
        settings = json.loads((folder / CONFIG_FILE).read_text("utf-8"))
        if isinstance(pattern := settings["target_modules"], str):
            adapted = {name.removeprefix(_PREFIX).partition(".lora_")[0] for name in tensors}
            settings["target_modules"] = sorted(
                name for name in adapted if re.fullmatch(pattern, whole.in_whole(name))
            )
        if parameters := settings.get("target_parameters"):
            settings["target_parameters"] = [whole.in_language_model(name) or name for name in parameters]
        Path(copy, CONFIG_FILE).write_text(json.dumps(settings), "utf-8")
        yield Path(copy)


def _renamed(name: str, rename: Callable[[str], str]) -> str:
    return _PREFIX + rename(name.removeprefix(_PREFIX))
