"""Merging of a trained adapter into its base model's weights, into a plain model folder."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.files.stored_quantization import FORMATS
from lowmem_ft.models.loading import load_model, load_model_config, load_tokenizer
from lowmem_ft.models.other_parts import other_parts
from lowmem_ft.models.quantizing.stored_quantizers import packed_format
from lowmem_ft.models.saving import save_model
from lowmem_ft.recipe.rules.path_checks import check_merge, recipe_beside
from lowmem_ft.techniques.adapters.lora import merge_adapter
from lowmem_ft.training.checkpoints.atomic_io import whole_folder
from lowmem_ft.training.checkpoints.checkpoint import explaining_write_errors
from lowmem_ft.training.export.model_card import merged_model_card

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
        UserError: if the folder is not an adapter, or one of another kind or model; or if the target is not empty.
        ModelError: if the base cannot be read.
        CheckpointError: if the folder cannot be written.
    """
    config = check_merge(adapter, target, base=base)
    hf_config = load_model_config(config)
    if (stored := packed_format(hf_config)) is not None:
        config = dataclasses.replace(config, quantization="dequantize")
    tokenizer = _tokenizer_of(adapter, config)
    model = load_model(config, hf_config, attn_implementation="eager", device=torch.device("cpu"), seed=0)
    merged_dtype = model.dtype if dtype == "auto" else getattr(torch, dtype)
    if stored is None:
        _warn_of_rounded_base(adapter)
    else:
        logger.info(
            "The base's files hold its weights in %s: the merged model has them unpacked, in %s.",
            FORMATS[stored],
            str(merged_dtype).removeprefix("torch."),
        )
    num_layers = merge_adapter(model, adapter, merged_dtype, track, other_parts(model))
    with explaining_write_errors(target), whole_folder(target) as partial:
        save_model(model, tokenizer, partial)
        card = merged_model_card(target.name, adapter, config.name_or_path or "")
        (partial / "README.md").write_text(card, "utf-8")
    rounded = (
        "" if merged_dtype == torch.float32 else f" and rounded to {str(merged_dtype).removeprefix('torch.')}"
    )
    logger.info("%d layers merged in float32%s; the model is in %s.", num_layers, rounded, target)


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
