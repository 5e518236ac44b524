"""transformers' quantisers of checkpoints in MXFP4 and FP8, with products that train on any device.

transformers' own products need the package ``kernels`` and a GPU; without them it unpacks the whole model to 16 bits.
These keep the bytes of the files. What transformers decides stays: which layers are packed, the names and types of
their tensors, how files with one tensor an expert become fused ones.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, FP8Experts, FP8GroupedLinear, FP8Linear
from transformers.integrations.mxfp4 import Mxfp4Dequantize
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, AutoHfQuantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.foundation.upstream.grouped_experts import weights_of
from lowmem_ft.foundation.upstream.patches import UpstreamChangedError
from lowmem_ft.models.files.stored_quantization import FORMATS, method_of
from lowmem_ft.models.quantizing import block_fp8, mxfp4
from lowmem_ft.models.quantizing.packed_experts import PackedExperts, fused_experts

logger = logging.getLogger(__name__)

# Untyped, as our methods take less by name than theirs.
_TheirMxfp4: Any = Mxfp4HfQuantizer
_TheirMxfp4Unpacking: Any = Mxfp4Dequantize
_TheirFp8: Any = FineGrainedFP8HfQuantizer
_TheirFp8Unpacking: Any = Fp8Dequantize


def packed_format(hf_config: PretrainedConfig) -> str | None:
    """Return the format that a checkpoint's weights are packed in, by its ``quant_method``; None: they are plain."""
    return method_of(getattr(hf_config, "quantization_config", None))


@contextlib.contextmanager
def stored_weights_trainable() -> Iterator[None]:
    """Let transformers load checkpoints in MXFP4 and FP8 for training within a block."""
    own = {method: AUTO_QUANTIZER_MAPPING[method] for method in FORMATS}
    AUTO_QUANTIZER_MAPPING.update(zip(FORMATS, (_Mxfp4Quantizer, _Fp8Quantizer), strict=True))
    try:
        yield
    finally:
        AUTO_QUANTIZER_MAPPING.update(own)


def unpacking_config(hf_config: PretrainedConfig) -> Any:
    """Return the config with which ``from_pretrained`` unpacks each weight as it is read."""
    is_mxfp4 = packed_format(hf_config) == "mxfp4"
    return Mxfp4Config(dequantize=True) if is_mxfp4 else FineGrainedFP8Config(dequantize=True)


def save_unpacked(model: nn.Module) -> None:
    """Let an unpacked model be saved as its class saves plain weights; transformers would save it packed again."""
    vars(model).pop("_weight_conversions", None)


def pack_as_stored(model: PreTrainedModel, hf_config: PretrainedConfig) -> None:
    """Give a model on the meta device the layers that ``from_pretrained`` would give it, without values.

    Args:
        model: plain.
        hf_config: names the format.
    """
    with stored_weights_trainable():
        quantizer: Any = AutoHfQuantizer.from_config(hf_config.quantization_config, pre_quantized=True)
    quantizer.preprocess_model(model, device_map=None)
    quantizer.postprocess_model(model)
    model.hf_quantizer = quantizer


def log_packed(model: nn.Module, hf_config: PretrainedConfig) -> None:
    """Log how many weights stay packed, and their bytes."""
    packed: list[Any] = [weight for weight in model.parameters() if hasattr(weight, "packed_shape")]
    logger.info(
        "Base: its weights stay in %s, as in its files: %s of %s, %s with their scales.",
        FORMATS[packed_format(hf_config) or ""],
        f"{sum(weight.packed_shape.numel() for weight in packed):,}",
        f"{sum(getattr(weight, 'packed_shape', weight.shape).numel() for weight in model.parameters()):,}",
        format_bytes(sum(weight.nbytes for weight in packed)),
    )


def _mark(values: Any, scales: Any, shape: tuple[int, ...]) -> None:
    """Let packed tensors say how many weights they hold: all are in the first, and none in the scales."""
    values.packed_shape, scales.packed_shape = torch.Size(shape), torch.Size((0,))


def _with_operation(conversions: list[Any], theirs: type, ours: Any) -> list[Any]:
    """Return conversions with our operation in the place of transformers', wherever its version attaches that.

    Raises:
        UpstreamChangedError: if it attaches it nowhere.
    """
    with_operations = [one for one in conversions if hasattr(one, "operations")]
    if not any(type(each) is theirs for one in with_operations for each in one.operations):
        raise UpstreamChangedError(f"conversions of a checkpoint with {theirs.__name__}")
    for one in with_operations:
        one.operations = [ours if type(each) is theirs else each for each in one.operations]
    return conversions


class _UnpackMxfp4(_TheirMxfp4Unpacking):
    """Unpacks experts to the type of their parameter; transformers 5.17 leaves them in bfloat16."""

    def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        dtype = kwargs["model"].get_parameter_or_buffer(kwargs["full_layer_name"]).dtype
        converted = super().convert(input_dict, **kwargs)
        return {name: values.to(dtype) for name, values in converted.items()}


class _Mxfp4Quantizer(_TheirMxfp4):
    """Keeps the blocks and scales of experts, by their names in the files."""

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Accept any device: nothing here needs a kernel."""

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        self.experts: list[nn.Module] = []
        if self.quantization_config.dequantize:
            return
        left = self.get_modules_to_not_convert(
            model, self.quantization_config.modules_to_not_convert, model._keep_in_fp32_modules
        )
        for name, module in fused_experts(model):
            if should_convert_module(name, left):
                self.experts.append(module)
                module._is_hf_initialized = True  # type: ignore[assignment]  # their own tensor is gone
                for weight in weights_of(module):
                    mxfp4.Mxfp4Weight.make_room(module, weight)
        if not self.experts:
            raise ModelError(
                f"A base in MXFP4 has fused experts; a {type(model).__name__} has none that are packed. Name the "
                "model that it was made from."
            )

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        for module in self.experts:
            weights = {name: mxfp4.Mxfp4Weight(module, name) for name in weights_of(module)}
            for name, weight in weights.items():
                values, scales = (module._parameters[stored] for stored in mxfp4.names_of(name))
                _mark(values, scales, weight.shape)
            device = next(module.parameters()).device
            module.register_buffer(mxfp4.PAIRS, mxfp4.pairs_of_bytes(torch.float32, device), persistent=False)
            module.forward = PackedExperts(module, None, weights)  # type: ignore[method-assign]
        return model

    def param_needs_quantization(self, *args: Any, **kwargs: Any) -> bool:
        """Return False: the files hold packed tensors."""
        return False

    def get_weight_conversions(self) -> list[Any]:
        """Return none: tensors in files have the parameters' names, unless they are unpacked."""
        if not self.quantization_config.dequantize:
            return []
        return _with_operation(super().get_weight_conversions(), Mxfp4Dequantize, _UnpackMxfp4(self))

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[None, dict[str, str]]:
        """Return nothing: a state dict has the names and bytes of the files."""
        return None, {}

    @property
    def is_trainable(self) -> bool:
        """True: gradients pass through to adapters."""
        return True


class _UnpackFp8(_TheirFp8Unpacking):
    """Unpacks a matrix as it is read. transformers' own takes a last block for a whole one, or refuses it.

    Whatever has no scales passes through it, too, in the type of the files; here it gets the type of its parameter.
    """

    def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        name, model = kwargs["full_layer_name"], kwargs["model"]
        dtype = model.get_parameter_or_buffer(name).dtype
        converted = super().convert(input_dict, **kwargs)
        lists = {key: one if isinstance(one, list) else [one] for key, one in converted.items()}
        if any(value.dtype.itemsize == 1 for values in lists.values() for value in values):
            raise ModelError(
                f"A weight in FP8 needs its scales, and {name} has none. Download the model again."
            )
        return {key: [value.to(dtype) for value in values] for key, values in lists.items()}

    def _dequantize_one(
        self, quantized: Tensor, scales: Tensor, output_dtype: torch.dtype | None = None
    ) -> Tensor:
        block = self.hf_quantizer.quantization_config.weight_block_size
        return block_fp8.unpack(quantized, scales, block, output_dtype or torch.bfloat16)


class _Fp8Quantizer(_TheirFp8):
    """Keeps 8-bit weights and scales, in linear layers and in fused experts."""

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Accept any device: nothing here needs a kernel."""

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        originals, experts = dict(model.named_modules()), dict(fused_experts(model))
        super()._process_model_before_weight_loading(model, **kwargs)
        self.experts: dict[nn.Module, dict[str, block_fp8.Fp8Weight]] = {}
        for name, module in list(model.named_modules()):
            if module is originals.get(name):
                continue
            module._is_hf_initialized = True  # type: ignore[assignment]  # 8 bits take no random values
            if type(module) is FP8Linear:
                module.__class__ = block_fp8.Fp8Linear  # type: ignore[assignment]
            elif isinstance(module, FP8Experts) and name in experts and not experts[name].is_transposed:
                model.set_submodule(name, experts[name])  # whose activation is the model's own
                experts[name]._is_hf_initialized = True  # type: ignore[assignment]
                self.experts[experts[name]] = self._make_room(experts[name], module)
            elif isinstance(module, (FP8Linear, FP8Experts, FP8GroupedLinear)):
                raise ModelError(
                    f"A base in FP8 has linear layers and fused experts; {name} of a {type(model).__name__} is "
                    f"neither: {type(originals[name]).__name__}. Name the model that it was made from."
                )

    def _make_room(self, module: nn.Module, theirs: nn.Module) -> dict[str, block_fp8.Fp8Weight]:
        block, weights = self.quantization_config.weight_block_size, {}
        for name in weights_of(module):
            own, scales = (theirs.get_parameter(one) for one in (name, block_fp8.scales_of(name)))
            weights[name] = block_fp8.Fp8Weight(module, name, block, 2 if name == "gate_up_proj" else 1)
            weights[name].make_room(own.dtype, scales.dtype)
        return weights

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        model = super()._process_model_after_weight_loading(model, **kwargs)
        for module in model.modules():
            for name in self._packed_in(module):
                values, scales = (module._parameters[one] for one in (name, block_fp8.scales_of(name)))
                assert values is not None
                assert scales is not None
                values, scales = values.requires_grad_(False), scales.requires_grad_(False)
                _mark(values, scales, tuple(values.shape))
        for module, weights in self.experts.items():
            module.forward = PackedExperts(module, None, weights)  # type: ignore[method-assign]
        return model

    def _packed_in(self, module: nn.Module) -> tuple[str, ...]:
        if isinstance(module, block_fp8.Fp8Linear):
            return ("weight",)
        return tuple(self.experts.get(module, ()))

    def param_needs_quantization(self, *args: Any, **kwargs: Any) -> bool:
        """Return False: the files hold packed tensors."""
        return False

    def update_weight_conversions(self, weight_conversions: list[Any], *args: Any) -> list[Any]:
        """Return conversions that unpack matrices as above if transformers is configured to dequantize."""
        stock = super().update_weight_conversions(weight_conversions, *args)
        if not self.quantization_config.dequantize:
            return stock
        return _with_operation(stock, Fp8Dequantize, _UnpackFp8(self))
