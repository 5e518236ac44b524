"""Saving a model that vanilla ``from_pretrained`` loads, verified by reading the folder back."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from lowmem_ft.foundation.errors import CheckpointError
from lowmem_ft.foundation.tensors.local_shards import whole_shape
from lowmem_ft.models.other_parts import LanguageNames, other_parts

logger = logging.getLogger(__name__)

MAX_SHARD_BYTES = 5 * 10**9
"""Maximum bytes of one weight file.

Weights on a GPU are copied to the host a file at a time: with transformers' 50 GB that would be all of them.
"""


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write weights (safetensors), config, generation config and tokenizer, then verify the folder.

    Other parts of the checkpoint that the model was read from are written, too.

    Raises:
        CheckpointError: if the folder, read back, does not hold this model.
    """
    with quiet_transformers():
        model.save_pretrained(folder, max_shard_size=MAX_SHARD_BYTES)
    _write_other_parts(model, folder)
    save_tokenizer(tokenizer, folder)
    verify_saved_model(model, folder)


def save_config(model: PreTrainedModel, folder: Path) -> None:
    """Write all of a model except its own weights: config, generation config, remote code, other parts."""
    with quiet_transformers():
        model.save_pretrained(folder, state_dict={})
    _write_other_parts(model, folder)


def _write_other_parts(model: PreTrainedModel, folder: Path) -> None:
    if parts := other_parts(model):
        parts.write(folder, model.dtype)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the tokenizer and its chat template."""
    with quiet_transformers():
        tokenizer.save_pretrained(folder)


def verify_saved_model(model: PreTrainedModel, folder: Path) -> None:
    """Reopen a saved model as a user would and compare it with the one in memory: keys, shapes, types and ties.

    Only headers are read: the folder is loaded by ``from_pretrained`` onto the meta device.

    Raises:
        CheckpointError: naming what is missing, unexpected or different.
    """
    try:
        with quiet_transformers():
            parts = other_parts(model)
            loader: Any = AutoModelForCausalLM if parts is None else type(parts.whole)
            loaded: Any = loader.from_pretrained(
                folder,
                device_map={"": "meta"},
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                # Safe: it is the model's own code, which transformers put there and which has been running all along.
                trust_remote_code=_has_own_code(model),
            )
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"The model saved in {folder} cannot be read back: {error}") from error
    reopened, report = loaded
    problems = [f"{kind}: {sorted(map(str, keys))[:5]}" for kind, keys in report.items() if keys]
    names = None if parts is None else parts.names
    saved, live = dict(reopened.named_parameters()), dict(model.named_parameters())
    if names is not None:
        saved = {own: weight for name, weight in saved.items() if (own := names.in_language_model(name))}
    problems += [
        f"{name}: {_kind(saved.get(name))} saved, {_kind(parameter)} in memory"
        for name, parameter in live.items()
        if _kind(saved.get(name)) != _kind(parameter)
    ][:5]
    if _ties(reopened, names) != _ties(model):
        problems.append(f"tied weights: {_ties(reopened, names)} saved, {_ties(model)} in memory")
    if problems:
        raise CheckpointError(
            f"The model saved in {folder} is not the one in memory ({'; '.join(problems)})."
        )


def _kind(parameter: torch.Tensor | None) -> tuple[tuple[int, ...], torch.dtype] | None:
    return None if parameter is None else (tuple(whole_shape(parameter)), parameter.dtype)


def _has_own_code(model: PreTrainedModel) -> bool:
    # Checks all of its classes: fully_shard derives a class from the model's.
    return any(kind.__module__.startswith("transformers_modules.") for kind in type(model).__mro__)


def _ties(model: PreTrainedModel, language: LanguageNames | None = None) -> list[list[str]]:
    """Return groups of names that share one parameter; with ``language``, only names of the language model."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        own = name if language is None else language.in_language_model(name)
        if own is not None:
            names.setdefault(id(parameter), []).append(own)
    return sorted(sorted(group) for group in names.values() if len(group) > 1)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress progress bars and load reports of transformers: our own message reports the result."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
