"""Merging of a trained adapter into its base model's weights, into a plain model folder."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lowmem_ft.foundation.system.atomic_write import whole_folder
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.files.stored_quantization import FORMATS
from lowmem_ft.models.hf_config import load_model_config
from lowmem_ft.models.loading import load_model
from lowmem_ft.models.other_parts import other_parts
from lowmem_ft.models.quantizing.stored_quantizers import packed_format
from lowmem_ft.models.saving import save_model
from lowmem_ft.models.tokenizer import load_tokenizer
from lowmem_ft.recipe.checks.path_checks import check_merge, recipe_beside
from lowmem_ft.techniques.adapters.saved_adapter import merge_adapter
from lowmem_ft.training.checkpoints.checkpoint import explaining_write_errors
from lowmem_ft.training.export.adapter_rows import resize_for_adapter
from lowmem_ft.training.export.disk_room import FREE_SPACE_AND_REPEAT, plain_bytes, require_room
from lowmem_ft.training.export.model_card import merged_model_card
from lowmem_ft.training.folder.own_files import replace_saved

logger = logging.getLogger(__name__)


def merge_into_base(
    adapter: Path,
    target: Path,
    *,
    base: str | None = None,
    dtype: str = "auto",
    track: Callable[[list[Any]], Iterable[Any]] = iter,
) -> None:
    """Write a model folder that ``from_pretrained`` loads: the base's weights with the adapter's products added.

    The base is held in host memory in its own type; one matrix at a time is merged in float32 and rounded once. If the
    base was quantised while training, the adapter is merged into its unquantised weights; one whose files hold it
    in MXFP4 or FP8 is unpacked, and stays so.

    Args:
        adapter: a folder in PEFT's format.
        target: the new folder; absent, or empty.
        base: hub id or folder of the base model; None: the base that the adapter names.
        dtype: type of the merged weights, such as ``bfloat16``; ``auto``: the base's own.
        track: wraps the list of layers, to show progress while they are merged.

    Raises:
        UserError: if the folder is not an adapter, or one of another kind or model; or if the target is not empty, or
            its disk has too little room.
        ModelError: if the base cannot be read.
        CheckpointError: if the folder cannot be written.
    """
    config = check_merge(adapter, target, base=base)
    require_room(target, {"the merged model": plain_bytes(config, dtype)})
    model, tokenizer = load_merged(config, adapter, dtype=dtype, track=track)
    with (
        explaining_write_errors(target, FREE_SPACE_AND_REPEAT),
        whole_folder(target, replace_saved) as partial,
    ):
        save_model(model, tokenizer, partial)
        card = merged_model_card(target.name, adapter, config.name_or_path or "")
        (partial / "README.md").write_text(card, "utf-8")
    logger.info("The model is in %s.", target)


def load_merged(
    config: ModelConfig,
    adapter: Path | None,
    *,
    dtype: str = "auto",
    track: Callable[[list[Any]], Iterable[Any]] = iter,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model to host memory, unpacked if its files hold it in MXFP4 or FP8, with an adapter merged into it.

    Args:
        config: the model's, from ``check_plain_model`` or ``base_of_adapter``.
        adapter: the adapter's folder; None: the model is taken as it is.
        dtype: type of the weights; ``auto``: the model's own.
        track: wraps the list of layers, to show progress while they are merged.

    Returns:
        The model, and the tokenizer that it was trained with.
    """
    hf_config = load_model_config(config)
    if (stored := packed_format(hf_config)) is not None:
        config = dataclasses.replace(config, quantization="dequantize")
    tokenizer = load_tokenizer(config) if adapter is None else _tokenizer_of(adapter, config)
    model = load_model(config, hf_config, attn_implementation="eager", device=torch.device("cpu"), seed=0)
    new_dtype = model.dtype if dtype == "auto" else getattr(torch, dtype)
    name_of_dtype = str(new_dtype).removeprefix("torch.")
    if stored is not None:
        logger.info(
            "The base's files hold its weights in %s: the new model has them unpacked, in %s.",
            FORMATS[stored],
            name_of_dtype,
        )
    if adapter is None:
        model.to(new_dtype)  # type: ignore[call-arg]
        return model, tokenizer
    if stored is None:
        _warn_of_rounded_base(adapter)
    resize_for_adapter(model, adapter, config.name_or_path or "")
    num_layers = merge_adapter(model, adapter, new_dtype, track, other_parts(model))
    rounded = "" if new_dtype == torch.float32 else f" and rounded to {name_of_dtype}"
    logger.info("%d layers merged in float32%s.", num_layers, rounded)
    return model, tokenizer


def _tokenizer_of(adapter: Path, config: ModelConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer in the adapter's folder, with which it was trained; else the base's."""
    if not (adapter / "tokenizer_config.json").is_file():
        return load_tokenizer(config)
    return load_tokenizer(ModelConfig(name_or_path=config.name_or_path, tokenizer_name_or_path=str(adapter)))


def _warn_of_rounded_base(adapter: Path) -> None:
    recipe = recipe_beside(adapter)
    quantization = "none" if recipe is None else recipe.model.quantization
    if recipe is not None and recipe.model.quantizes:
        logger.warning(
            "The adapter was trained on weights rounded by model.quantization=%s, and is merged into the weights "
            "before that rounding: the merged model differs slightly from the one that was evaluated.",
            quantization,
        )
