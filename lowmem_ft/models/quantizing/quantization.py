"""Frozen weights of decoder layers in 4 or 8 bits, by bitsandbytes through transformers.

That includes fused experts (``packed_experts.py``).

The head and the embeddings keep their type: they are a small part of the weights and the most sensitive one. Norms keep
theirs too. PEFT's ``prepare_model_for_kbit_training`` would copy all of these to float32, 2.1 GB more for a model of 8B
parameters, so that 16-bit training gets exact norms; the norms of transformers compute in float32 by themselves, and
gradients of frozen weights are never computed.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.quantizers.auto import AutoHfQuantizer

from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.foundation.tensors.logical_size import logical_numel
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.quantizing.expert_quantizer import experts_packed

logger = logging.getLogger(__name__)

MOST_LEFT = 0.05
"""Largest share of a decoder's weights that may keep its type: more, and "4 bits" would mislead about memory."""


def quantization_config(config: ModelConfig, compute_dtype: torch.dtype) -> BitsAndBytesConfig | None:
    """Return the config with which ``from_pretrained`` quantises each weight as it is read; None without quantisation.

    Args:
        config: the recipe's model group.
        compute_dtype: type that 4-bit weights, and experts, are unpacked to for each product.

    Returns:
        NF4 with its scales quantised too (Dettmers et al., "QLoRA", 2023), or LLM.int8 (Dettmers et al., 2022).
    """
    if config.quantization == "nf4":
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=compute_dtype,
        )
    if config.quantization == "int8":
        # The type is that of experts; Linear8bitLt takes its input's.
        return BitsAndBytesConfig(load_in_8bit=True, bnb_4bit_compute_dtype=compute_dtype)
    return None


def quantize_weights(model: PreTrainedModel, bits: BitsAndBytesConfig) -> None:
    """Quantise in place what ``from_pretrained`` would, for weights that come from no checkpoint.

    Args:
        model: its weights may be on the meta device; there the layers change, and hold nothing.
        bits: from :func:`quantization_config`.
    """
    with experts_packed():
        quantizer: Any = AutoHfQuantizer.from_config(bits, pre_quantized=False)
    originals = dict(model.named_modules())
    quantizer.preprocess_model(model, device_map=None)
    for name, module in model.named_modules():
        if module is not originals.get(name) and name in originals:
            _fill(module, originals.pop(name))
    quantizer.postprocess_model(model)
    model.hf_quantizer = quantizer
    keep_one_layout(model)


def keep_one_layout(model: nn.Module) -> None:
    """Keep 4-bit weights on a CPU in the only layout that backward can read.

    On processors with AVX512-BF16 bitsandbytes repacks a layer's weight in its first evaluation, for a faster kernel
    that has no derivative; training would continue with products that pass no gradient on (bitsandbytes 0.50.2,
    ``Linear4bit.forward``).
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def check_quantization(model: PreTrainedModel, config: ModelConfig) -> None:
    """Log how much of a model is quantised, and reject one of whose decoder much is not.

    Raises:
        ModelError: if more than a twentieth of the weights, without embeddings and head, keeps its type, unless the
            recipe consents.
    """
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    ends = {id(part.weight) for part in (*tables, model.get_output_embeddings()) if part is not None}
    sizes = {
        name: (logical_numel(weight), weight.is_floating_point()) for name, weight in model.named_parameters()
    }
    decoder = {name: sizes[name] for name, weight in model.named_parameters() if id(weight) not in ends}
    logger.info(
        "Quantization: %s for %s of %s weights; the head, embeddings and norms keep their type.",
        config.quantization,
        f"{sum(numel for numel, is_float in sizes.values() if not is_float):,}",
        f"{sum(numel for numel, _ in sizes.values()):,}",
    )
    left = {name: numel for name, (numel, is_float) in decoder.items() if is_float}
    share = sum(left.values()) / max(1, sum(numel for numel, _ in decoder.values()))
    if share > MOST_LEFT and not config.quantize_partly:
        raise ModelError(
            f"model.quantization={config.quantization} must reach {1 - MOST_LEFT:.0%} of the weights of a decoder, but "
            f"{share:.0%} of {type(model).__name__}'s are in no layer that it packs, such as "
            f"{max(left, key=lambda name: left[name])}. Set model.quantization=none, or accept it with "
            "model.quantize_partly=true."
        )


def _fill(module: Any, original: Any) -> None:
    """Give a layer that transformers has substituted for another its weight and bias."""
    from bitsandbytes import nn as bitsandbytes_nn

    values: Tensor = original.weight.data
    if module.source_cls is not nn.Linear:
        values = values.T  # GPT-2's Conv1D keeps its weight transposed
    device = values.device
    parameter_class: Any = getattr(bitsandbytes_nn, type(module.weight).__name__)
    if parameter_class is bitsandbytes_nn.Int8Params and not values.is_meta:
        values = values.cpu()  # it quantises on the copy from there
    settings = {key: value for key, value in vars(module.weight).items() if key != "SCB"}
    weight: Any = parameter_class(values, requires_grad=False, **settings)
    module.weight = weight if values.is_meta else weight.to(device)
    if original.bias is not None:
        module.bias = original.bias.requires_grad_(False)
    module.training = original.training
