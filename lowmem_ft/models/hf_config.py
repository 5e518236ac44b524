"""The transformers config of a model: loading it, and the types and sizes that it gives."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.models.architecture import (
    catalogue_config,
    refuse_draft_model,
    refuse_incomplete,
    refuse_odd_routing,
)
from lowmem_ft.models.causality import refuse_bidirectional
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.files.model_files import limit_of_positions
from lowmem_ft.models.files.sources import BY_WHAT_IS_WRITTEN, source_of
from lowmem_ft.models.files.stored_quantization import FORMATS, packing_problem, refuse_other_formats
from lowmem_ft.models.loading_errors import brings_code, explained
from lowmem_ft.models.new_tokens import with_new_rows
from lowmem_ft.models.other_parts import OtherParts, language_config
from lowmem_ft.models.quantizing.stored_quantizers import packed_format

logger = logging.getLogger(__name__)


def load_model_config(config: ModelConfig, *, architecture_only: bool = False) -> PretrainedConfig:
    """Load the model's architecture, without weights; for a model with several parts, its language model's.

    Args:
        config: the recipe's model group.
        architecture_only: the weights will not be needed, so that the catalogue's copy is enough for the models it has,
            including gated ones, without a network; the vocabulary counts a row for each token of ``model.add_tokens``.

    Raises:
        ModelError: if the name is no folder, no GGUF file and no reachable hub repository, or holds no causal LM (an
            encoder is not one, although transformers has a class that would accept it); or if its config.json is
            invalid or incomplete.
    """
    if architecture_only and (catalogued := catalogue_config(config)):
        _settle_packing(config, catalogued)
        return with_new_rows(language_config(catalogued), config)
    hf_config = _whole_config(config, says=True)
    _settle_packing(config, hf_config)
    if (language := language_config(hf_config)) is not hf_config:
        logger.info(
            "%s is a model of several parts (%s): its language model is trained, and the others stay on the disk, and "
            "are copied into what is saved.",
            config.name_or_path,
            hf_config.model_type,
        )
    refuse_bidirectional(config.name_or_path or "", language)
    return with_new_rows(language, config) if architecture_only else language


def other_parts_of(config: ModelConfig) -> OtherParts | None:
    """Return the parts of a model that its run does not train, without weights; None: it has no such parts."""
    if config.weights == "random" or config.is_gguf:
        return None
    hf_config = catalogue_config(config) or _whole_config(config)
    return (
        None
        if language_config(hf_config) is hf_config
        else OtherParts(json.loads(hf_config.to_json_string(use_diff=False)))
    )


def _whole_config(config: ModelConfig, *, says: bool = False) -> PretrainedConfig:
    """Read the config of all parts of a model."""
    source = source_of(config)
    path = source.pop("path")
    if says and path != config.name_or_path and not Path(path).is_dir():
        logger.info("model.name_or_path=%s is the hub's %s.", config.name_or_path, path)
    if says and config.trust_remote_code:
        logger.warning(
            "model.trust_remote_code=true: Python code from %s runs with your rights.%s",
            path,
            ""
            if config.revision or Path(path).is_dir()
            else " Pin the version that you have read with model.revision=COMMIT.",
        )
    try:
        hf_config = AutoConfig.from_pretrained(path, **source)
        del source["trust_remote_code"]  # only for Auto classes
        written, _ = ({}, None) if "gguf_file" in source else PretrainedConfig.get_config_dict(path, **source)
    except (OSError, ValueError, *BY_WHAT_IS_WRITTEN) as error:
        raise explained(config, error) from error
    if type(language_config(hf_config)) not in AutoModelForCausalLM._model_mapping:
        if "AutoModelForCausalLM" not in (getattr(hf_config, "auto_map", None) or {}):
            raise ModelError(
                f"model.name_or_path needs a causal language model, but {config.name_or_path} is of type "
                f"{hf_config.model_type!r}, which transformers has no causal LM for. Choose a decoder model."
            )
        # transformers asks only if the config itself is of a remote class; causal_lm_class() never asks.
        if not config.trust_remote_code:
            raise brings_code(path)
    refuse_other_formats(config.name_or_path or "", written.get("quantization_config"))
    if written:
        refuse_incomplete(path, written, hf_config)
    refuse_odd_routing(config.name_or_path or "", language_config(hf_config))
    refuse_draft_model(config.name_or_path or "", hf_config)
    return hf_config


def _settle_packing(config: ModelConfig, hf_config: PretrainedConfig) -> None:
    """Reject a ``model.quantization`` that does not go with a checkpoint's files; weights at random are plain.

    Raises:
        ModelError: if packed weights would be packed again, plain ones be unpacked, or a model has several parts.
    """
    stored, name = packed_format(hf_config), config.name_or_path or ""
    if stored is not None and (config.weights == "random" or config.is_gguf):
        delattr(hf_config, "quantization_config")
        stored = None
    if problem := packing_problem(stored, config.quantization, name):
        raise ModelError(problem)
    if stored is not None and language_config(hf_config) is not hf_config:
        raise ModelError(
            f"A base in {FORMATS[stored]} must be a text-only model, but {name} is a model of several parts "
            f"({hf_config.model_type}). Name the model that it was made from."
        )


def compute_dtype(dtype: torch.dtype, mixed_precision: str) -> torch.dtype:
    """Return the type that matrix products run in: autocast's if it is on, else the weights' own."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mixed_precision, dtype)


def weights_dtype(config: ModelConfig, hf_config: PretrainedConfig) -> torch.dtype:
    """Return the type that the weights will be kept in; ``auto`` is the type that the checkpoint's config names."""
    dtype = named_dtype(config)
    if isinstance(dtype, torch.dtype):
        return dtype
    return hf_config.dtype if isinstance(hf_config.dtype, torch.dtype) else torch.float32


def max_positions(hf_config: PretrainedConfig) -> int | None:
    """Return the longest sequence that the architecture was made for, in tokens; None if the config names no limit."""
    text_config = hf_config.get_text_config()
    return limit_of_positions(lambda name: getattr(text_config, name, None))


def vocab_size(hf_config: PretrainedConfig) -> int | None:
    """Return the rows of the embedding, which bound every token id; None if the config does not say."""
    size = getattr(hf_config.get_text_config(), "vocab_size", None)
    return size if isinstance(size, int) else None


def named_dtype(config: ModelConfig) -> torch.dtype | str:
    """Return the type that ``model.dtype`` names, as transformers takes it."""
    return "auto" if config.dtype == "auto" else getattr(torch, config.dtype)
