"""Read a model: hub id, local folder or GGUF file; safetensors only; straight to the device.

transformers builds the model on the meta device and reads one tensor at a time into its place, so the host never
holds a second copy of the weights: the peak is the weights plus the largest tensor (``scripts/measure_load.py``).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from lowmem_ft.foundation.errors import MissingPackageError, ModelError
from lowmem_ft.foundation.out_of_memory_errors import is_failed_allocation
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.foundation.user_paths import expand_user
from lowmem_ft.models.architecture import (
    catalogue_config,
    refuse_draft_model,
    refuse_incomplete,
    refuse_odd_routing,
)
from lowmem_ft.models.causality import refuse_bidirectional
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.files.checkpoint_files import causal_lm_class, generation_config
from lowmem_ft.models.files.hub_names import hub_id_of, nearest_names, out_of_reach
from lowmem_ft.models.files.model_files import limit_of_positions
from lowmem_ft.models.files.sources import BY_WHAT_IS_WRITTEN, DAMAGED_GGUF, first_line, source_of
from lowmem_ft.models.files.stored_quantization import (
    FORMATS,
    packing_problem,
    refuse_other_formats,
    refuse_other_types,
)
from lowmem_ft.models.load_report import report_held
from lowmem_ft.models.new_tokens import resize_embeddings, set_new_rows, with_new_rows
from lowmem_ft.models.other_parts import OtherParts, language_config, language_weights, set_other_parts
from lowmem_ft.models.quantizing.expert_quantizer import experts_packed
from lowmem_ft.models.quantizing.quantization import (
    check_quantization,
    keep_one_layout,
    quantization_config,
    quantize_weights,
)
from lowmem_ft.models.quantizing.stored_quantizers import (
    log_packed,
    packed_format,
    save_unpacked,
    stored_weights_trainable,
    unpacking_config,
)
from lowmem_ft.models.tokenizer import load_tokenizer as load_tokenizer  # many import it from here
from lowmem_ft.models.tokenizer import new_token_ids
from lowmem_ft.tensors.finiteness import names_of_not_finite, some_of

logger = logging.getLogger(__name__)


_OTHER_HEADS = ("Classification", "ForQuestionAnswering", "ForMaskedLM", "RewardModel", "ForMultipleChoice")
"""Suffixes of the names of classes whose heads predict no next token."""


def load_model_config(config: ModelConfig, *, architecture_only: bool = False) -> PretrainedConfig:
    """Load the architecture of the model, without its weights: of a model of several parts, the language model's.

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
        raise _explained(config, error) from error
    if type(language_config(hf_config)) not in AutoModelForCausalLM._model_mapping:
        if "AutoModelForCausalLM" not in (getattr(hf_config, "auto_map", None) or {}):
            raise ModelError(
                f"model.name_or_path needs a causal language model, but {config.name_or_path} is of type "
                f"{hf_config.model_type!r}, which transformers has no causal LM for. Choose a decoder model."
            )
        # transformers asks only if the config itself is of a remote class; causal_lm_class() never asks.
        if not config.trust_remote_code:
            raise _brings_code(path)
    refuse_other_formats(config.name_or_path or "", written.get("quantization_config"))
    if written:
        refuse_incomplete(path, written, hf_config)
    refuse_odd_routing(config.name_or_path or "", language_config(hf_config))
    refuse_draft_model(config.name_or_path or "", hf_config)
    return hf_config


def load_model(
    config: ModelConfig,
    hf_config: PretrainedConfig,
    *,
    attn_implementation: str,
    device: torch.device,
    seed: int,
    mixed_precision: str = "no",
) -> PreTrainedModel:
    """Load the model with its weights on ``device`` at ``model.dtype``, or in ``model.quantization``'s 4 or 8 bits.

    A weight is quantised, or unpacked, as soon as it is read: there is never a second copy of the model. Weights that
    the files hold in MXFP4 or FP8 stay as they are unless ``model.quantization=dequantize``.

    Args:
        config: the recipe's model group.
        hf_config: what :func:`load_model_config` returned for it.
        attn_implementation: the attention kernel chosen for this run.
        device: the device of the weights; each tensor is copied there as it is read.
        seed: seeds the initial weights when ``model.weights`` is ``random``, and the rows of new tokens.
        mixed_precision: that of the run; decides the type that quantised weights are unpacked to.

    Raises:
        ModelError: if weights are missing, are not safetensors, or do not match the architecture.
    """
    model = _loaded(config, hf_config, attn_implementation, device, seed, mixed_precision)
    if config.new_tokens:
        tokenizer = load_tokenizer(config)
        resize_embeddings(model, len(tokenizer), seed, config.name_or_path or "")
        set_new_rows(model, new_token_ids(tokenizer, config))
    return model


def _loaded(
    config: ModelConfig,
    hf_config: PretrainedConfig,
    attn_implementation: str,
    device: torch.device,
    seed: int,
    mixed_precision: str,
) -> PreTrainedModel:
    bits = quantization_config(config, compute_dtype(weights_dtype(config, hf_config), mixed_precision))
    if config.weights == "random":
        model = _random_model(config, hf_config, attn_implementation, device, seed)
        if bits is not None:
            quantize_weights(model, bits)
            check_quantization(model, config)
        return model
    source = source_of(config)
    options = {
        "config": hf_config,
        "dtype": _dtype(config),
        "attn_implementation": attn_implementation,
        "device_map": {"": device},
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # they are in the report, from which they are rejected by name below
    }
    stored = packed_format(hf_config)
    if bits is not None:
        options["quantization_config"] = bits
    elif config.quantization == "dequantize":
        options["quantization_config"] = unpacking_config(hf_config)
    with report_held() as held:
        try:
            read = _from_gguf if "gguf_file" in source else _from_safetensors
            with experts_packed() if bits is not None else stored_weights_trainable():
                model, report = read(source.pop("path"), source, options)
        except torch.OutOfMemoryError:
            raise  # not the checkpoint's fault
        except (OSError, ValueError, ImportError, RuntimeError, SafetensorError, *DAMAGED_GGUF) as error:
            raise _explained(config, error, held.unconverted) from error
        _refuse_missing_weights(config, hf_config, report)
    held.log()
    if bits is not None:
        keep_one_layout(model)
        check_quantization(model, config)
    elif config.quantization == "dequantize":
        save_unpacked(model)
        logger.info(
            "Base: its weights, in %s in its files, are unpacked: %s (model.quantization=dequantize).",
            FORMATS[stored or ""],
            format_bytes(sum(weight.nbytes for weight in model.parameters())),
        )
    elif stored is not None:
        log_packed(model, hf_config)
    return model


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
            f"A base in {FORMATS[stored]} must be a language model alone, and {name} is a model of several parts "
            f"({hf_config.model_type}). Name the model that it was made from."
        )


def compute_dtype(dtype: torch.dtype, mixed_precision: str) -> torch.dtype:
    """Return the type that matrix products run in: autocast's if it is on, else the weights' own."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mixed_precision, dtype)


def weights_dtype(config: ModelConfig, hf_config: PretrainedConfig) -> torch.dtype:
    """Return the type that the weights will be kept in; ``auto`` is the type that the checkpoint's config names."""
    dtype = _dtype(config)
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


def _dtype(config: ModelConfig) -> torch.dtype | str:
    return "auto" if config.dtype == "auto" else getattr(torch, config.dtype)


def _from_safetensors(
    path: str, source: dict[str, Any], options: dict[str, Any]
) -> tuple[PreTrainedModel, dict[str, Any]]:
    source.pop("trust_remote_code")  # settled when the config was read
    model_class: Any = causal_lm_class(options["config"], path, **source)
    opened = language_weights(options["config"], path, **source)
    types = {name: weight.get_dtype() for name, weight in opened.state_dict.items()}
    refuse_other_types(path, packed_format(options["config"]), types)
    model, report = model_class.from_pretrained(
        None, state_dict=opened.state_dict, key_mapping=opened.key_mapping, **options
    )
    set_other_parts(model, opened.other_parts)
    model.name_or_path = model.config.name_or_path = path
    model.generation_config = generation_config(model, path, **source)
    return model, report


def _from_gguf(
    path: str, source: dict[str, Any], options: dict[str, Any]
) -> tuple[PreTrainedModel, dict[str, Any]]:
    logger.info("Weights of %s are unpacked from GGUF to %s.", source["gguf_file"], options["dtype"])
    model_class: Any = AutoModelForCausalLM
    model, report = model_class.from_pretrained(
        path, quantization_config=_dequantize_gguf(), **source, **options
    )
    names = names_of_not_finite(model.named_parameters())
    if names:
        raise ModelError(
            f"A weight must be finite, but in {source['gguf_file']} these hold NaN or infinity: {some_of(names)}. "
            "Download or convert the file again."
        )
    return model, report


def _random_model(
    config: ModelConfig,
    hf_config: PretrainedConfig,
    attn_implementation: str,
    device: torch.device,
    seed: int,
) -> PreTrainedModel:
    logger.info(
        "Weights are initialised at random from the config alone (model.weights=random, seed %d).", seed
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_of_config(config, hf_config, attn_implementation, device)
    model.generation_config = GenerationConfig.from_model_config(model.config)
    return model


def model_of_config(
    config: ModelConfig, hf_config: PretrainedConfig, attn_implementation: str, device: torch.device
) -> PreTrainedModel:
    """Return a model with the weights that its class begins with.

    Raises:
        ModelError: if the class rejects the config, or needs a package that is not installed.
    """
    try:
        with device:
            return AutoModelForCausalLM.from_config(
                hf_config,
                dtype=weights_dtype(config, hf_config),
                attn_implementation=attn_implementation,
                trust_remote_code=config.trust_remote_code,
            )
    except (ImportError, LookupError, RuntimeError, ValueError, *BY_WHAT_IS_WRITTEN) as error:
        if is_failed_allocation(error):
            raise
        raise ModelError(
            f"The config of {config.name_or_path} cannot build a {hf_config.model_type} model: {type(error).__name__} "
            f"{' '.join(str(error).split())}. Compare its config.json with that of a published model of the family."
        ) from error


def _dequantize_gguf() -> Any:
    """Return the config for plain weights of a GGUF file; a transformers without such a config always unpacks."""
    config_class = getattr(transformers, "GgufConfig", None)
    return config_class(dequantize=True) if config_class else None


def _refuse_missing_weights(config: ModelConfig, hf_config: PretrainedConfig, report: dict[str, Any]) -> None:
    """Reject a checkpoint that lacks weights, which would silently be trained from random values."""
    wrong = {
        kind: sorted(map(_weight_name, report.get(kind) or ()))
        for kind in ("missing_keys", "mismatched_keys")
    }
    problems = [
        f"{kind.removesuffix('_keys')}: {', '.join(keys[:5])}{f' and {len(keys) - 5} more' if len(keys) > 5 else ''}"
        for kind, keys in wrong.items()
        if keys
    ]
    other_heads = [name for name in hf_config.architectures or () if name.endswith(_OTHER_HEADS)]
    if problems and other_heads:
        raise ModelError(
            f"{config.name_or_path} is a {other_heads[0]}, a model with a head other than that of a causal language "
            f"model ({'; '.join(problems)}). Choose the language model that it was made from."
        )
    if problems:
        raise ModelError(
            f"The weights in {config.name_or_path} do not match its config.json ({'; '.join(problems)}). "
            "Download the model again, or point model.name_or_path at a complete checkpoint."
        )


def _weight_name(key: str | tuple[str, torch.Size, torch.Size]) -> str:
    """Return a weight's name: a missing one is reported by name, a mismatched one with its two shapes."""
    return key if isinstance(key, str) else f"{key[0]} {list(key[1])} instead of {list(key[2])}"


def _explained(
    config: ModelConfig, error: Exception, unconverted: Sequence[str] = ()
) -> ModelError | MissingPackageError:
    """Return an error that tells users the way out of whatever transformers or the hub raised.

    Args:
        config: the recipe's model group.
        error: what was raised.
        unconverted: weights that transformers could not make from those in the files.
    """
    name = hub_id_of(config.name_or_path or "")
    causes = _cause_names(error)
    if isinstance(error, ImportError) and "gguf" in str(error).lower():
        return MissingPackageError("A GGUF model", "gguf", extra="gguf")
    if "GatedRepoError" in causes:
        return ModelError(
            f"{name} is gated: its authors require that you accept a licence. Open https://huggingface.co/{name}, "
            "accept it, run `hf auth login`, and try again."
        )
    if "RepositoryNotFoundError" in causes or "RevisionNotFoundError" in causes:
        return ModelError(
            f"The hub has no model {name} at revision {config.revision or 'main'} (or it is private and you are not "
            f"logged in: `hf auth login`). Check the spelling, or pass a local folder.{nearest_names(name)}"
        )
    if {"LocalEntryNotFoundError", "ConnectError", "OfflineModeIsEnabled"} & causes:
        return out_of_reach(name)
    if config.is_gguf and isinstance(error, (ValueError, OSError, RuntimeError, *DAMAGED_GGUF)):
        return ModelError(
            f"The GGUF file of {name} is damaged or truncated ({type(error).__name__}: {first_line(error)}) Download "
            "it again."
        )
    if "trust_remote_code" in str(error):
        return _brings_code(name)
    if "does not recognize this architecture" in str(error):
        return ModelError(
            f"{name} is of a model type that transformers {transformers.__version__} does not know: "
            f"{first_line(error)} Upgrade it (pip install -U transformers), or choose another model."
        )
    if isinstance(error, BY_WHAT_IS_WRITTEN):
        kind = "" if isinstance(error, StrictDataclassError) else f"{type(error).__name__}: "
        return ModelError(
            f"The config.json of {name} is invalid: {kind}{' '.join(str(error).split())} Correct the field, or take "
            "the config.json of the model's original repository."
        )
    if "Should have a `model_type`" in str(error) and (expand_user(name) / "config.json").is_file():
        return ModelError(
            f"A config.json must give model_type; that of {name} lacks it. Add the field, or take the config.json of "
            "the model's original repository."
        )
    if "automatic conversion of the weights" in str(error):
        return ModelError(
            f"The files of {name} must hold all experts of each layer, with their scales if they have any, in the "
            f"shapes that its config.json gives; {some_of(list(unconverted)) or 'one tensor'} could not be put "
            "together from them. "
            "Download the model again."
        )
    if "SafetensorError" in causes:
        return ModelError(f"The weights of {name} are damaged: {first_line(error)} Download the model again.")
    return ModelError(
        f"{name} cannot be read as a causal language model: {first_line(error)} A model folder holds config.json and "
        "*.safetensors; convert older .bin files with from_pretrained(...).save_pretrained(...)."
    )


def _brings_code(name: str) -> ModelError:
    return ModelError(
        f"{name} brings its own Python code. Read it, then set model.trust_remote_code=true and pin it with "
        "model.revision=COMMIT."
    )


def _cause_names(error: BaseException | None) -> set[str]:
    names = set()
    while error is not None:
        names.add(type(error).__name__)
        error = error.__cause__ or error.__context__
    return names
