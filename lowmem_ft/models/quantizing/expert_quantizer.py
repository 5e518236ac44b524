"""transformers' quantisers, which pack fused experts, too. bitsandbytes is imported when one is needed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizer_bnb_8bit import Bnb8BitHfQuantizer

from lowmem_ft.foundation.upstream.grouped_experts import weights_of
from lowmem_ft.models.quantizing.experts_in_parts import ReadExperts, in_parts
from lowmem_ft.models.quantizing.packed_experts import Format, PackedExperts, fused_experts, pack

_METHODS: dict[str, Format] = {"bitsandbytes_4bit": "nf4", "bitsandbytes_8bit": "int8"}


@contextlib.contextmanager
def experts_packed() -> Iterator[None]:
    """Let transformers pack fused experts, too, within a block, where it packs linear layers."""
    own = {method: AUTO_QUANTIZER_MAPPING[method] for method in _METHODS}
    AUTO_QUANTIZER_MAPPING.update({method: _quantizer_class(kind) for method, kind in _METHODS.items()})
    try:
        yield
    finally:
        AUTO_QUANTIZER_MAPPING.update(own)


@functools.cache
def _quantizer_class(kind: Format) -> type:
    from transformers.integrations import bitsandbytes as operations  # imports bitsandbytes

    stock_operation: Any = operations.Bnb4bitQuantize if kind == "nf4" else operations.Bnb8bitQuantize
    stock_quantizer: Any = Bnb4BitHfQuantizer if kind == "nf4" else Bnb8BitHfQuantizer

    class Pack(stock_operation):
        """Packs a tensor that has been read."""

        def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
            read = {
                name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()
            }
            own = self.hf_quantizer
            packed: dict[str, Tensor] = {
                name: own.pack_experts(name, value.__getitem__, value.shape)
                for name, value in read.items()
                if name in own.modules_of_experts
            }
            others = {name: value for name, value in read.items() if name not in packed}
            return packed | (super().convert(others, *args, **kwargs) if others else {})

    class ExpertQuantizer(stock_quantizer):
        """Packs each linear layer as bitsandbytes does, and experts as they are read, some at a time."""

        def _process_model_before_weight_loading(
            self, model: PreTrainedModel, *args: Any, **kwargs: Any
        ) -> None:
            super()._process_model_before_weight_loading(model, *args, **kwargs)
            self.experts = dict(fused_experts(model, kind))
            self.modules_of_experts = {
                f"{name}.{weight}": module
                for name, module in self.experts.items()
                for weight in weights_of(module)
            }

        def _process_model_after_weight_loading(
            self, model: PreTrainedModel, **kwargs: Any
        ) -> PreTrainedModel:
            dtype: Any = self.quantization_config.bnb_4bit_compute_dtype
            for module in self.experts.values():
                PackedExperts.install(module, dtype, kind)
            return super()._process_model_after_weight_loading(model, **kwargs)

        def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
            return param_name in self.modules_of_experts or super().param_needs_quantization(
                model, param_name, **kwargs
            )

        @staticmethod
        def get_modules_to_not_convert(model: PreTrainedModel, *args: Any, **kwargs: Any) -> list[str]:
            """Return what stays as it is: what transformers leaves out, and layers whose weights are clamped."""
            stock = stock_quantizer.get_modules_to_not_convert(model, *args, **kwargs)
            return [*stock, *_names_of_clamped_layers(model)]

        def get_quantize_ops(self) -> Pack:
            return Pack(self)

        def update_weight_conversions(self, weight_conversions: list[Any], *args: Any) -> list[Any]:
            """Return conversions that put no tensor of experts together."""
            stock = super().update_weight_conversions(weight_conversions, *args)
            return in_parts(stock, self.modules_of_experts)

        def pack_experts(self, name: str, read: ReadExperts, shape: tuple[int, ...]) -> Tensor:
            """Return the packed tensor of a name."""
            return pack(self.modules_of_experts[name], read, shape, kind)

    return ExpertQuantizer


def _names_of_clamped_layers(model: PreTrainedModel) -> list[str]:
    """Return the names of layers whose weights are clamped in each forward pass of training, as in Gemma 3n."""
    if getattr(model.config.get_text_config(), "altup_coef_clip", None) is None:
        return []
    coefficients = ("prediction_coefs", "correction_coefs")
    return [name for name, _ in model.named_modules() if name.endswith(coefficients)]
