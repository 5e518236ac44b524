"""Read a model: hub id, local folder or GGUF file; safetensors only; straight to the device.

transformers builds the model on the meta device and reads one tensor at a time into its place, so the host never
holds a second copy of the weights: the peak is the weights plus the largest tensor (``scripts/calibrate load``).
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.foundation.out_of_memory_errors import is_failed_allocation
from lowmem_ft.foundation.tensors.finiteness import names_of_not_finite, some_of
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.files.checkpoint_files import causal_lm_class, generation_config
from lowmem_ft.models.files.sources import BY_WHAT_IS_WRITTEN, DAMAGED_GGUF, source_of
from lowmem_ft.models.files.stored_quantization import FORMATS, refuse_other_types
from lowmem_ft.models.hf_config import compute_dtype, named_dtype, weights_dtype
from lowmem_ft.models.loading_errors import explained, refuse_layers_beyond, refuse_missing_weights
from lowmem_ft.models.new_tokens import resize_embeddings, set_new_rows
from lowmem_ft.models.other_parts import language_weights, set_other_parts
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
from lowmem_ft.models.tokenizer import load_tokenizer, new_token_ids

logger = logging.getLogger(__name__)


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
        "dtype": named_dtype(config),
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
    with _report_held() as held:
        try:
            read = _from_gguf if "gguf_file" in source else _from_safetensors
            with experts_packed() if bits is not None else stored_weights_trainable():
                model, report = read(source.pop("path"), source, options)
        except torch.OutOfMemoryError:
            raise  # not the checkpoint's fault
        except (OSError, ValueError, ImportError, RuntimeError, SafetensorError, *DAMAGED_GGUF) as error:
            raise explained(config, error, held.unconverted) from error
        refuse_missing_weights(config, hf_config, report)
        refuse_layers_beyond(config, hf_config, report)
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
            f"Weights must be finite, but {source['gguf_file']} has NaN or infinity in {some_of(names)}. "
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


_REPORT, _ROW = "LOAD REPORT", re.compile(r"^(\S+)\s*\|[^|\n]*CONVERSION", re.MULTILINE)


class _HeldReport(logging.Filter):
    """Holds back ``from_pretrained``'s report of missing weights until it is known whether an error says the same."""

    def __init__(self) -> None:
        super().__init__()
        self._records: list[logging.LogRecord] = []

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is something else."""
        is_other = _REPORT not in record.getMessage()
        if not is_other:
            self._records.append(record)
        return is_other

    def log(self) -> None:
        """Log what was held."""
        for record in self._records:
            logging.getLogger(record.name).handle(record)

    @property
    def unconverted(self) -> list[str]:
        """The weights that could not be put together from the files' own."""
        return [name for record in self._records for name in _ROW.findall(record.getMessage())]


@contextlib.contextmanager
def _report_held() -> Iterator[_HeldReport]:
    """Keep transformers from logging its report within a block."""
    logger, report = logging.getLogger("transformers.modeling_utils"), _HeldReport()
    logger.addFilter(report)
    try:
        yield report
    finally:
        logger.removeFilter(report)
