"""transformers' quantiser to 4 bits, which packs fused experts, too. bitsandbytes is imported when one is needed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from lowmem_ft.models.quantizing.packed_experts import PackedExperts, fused_experts, pack
from lowmem_ft.upstream.grouped_experts import weights_of

_METHOD = "bitsandbytes_4bit"


@contextlib.contextmanager
def experts_packed() -> Iterator[None]:
    """Let transformers pack fused experts, too, within a block, where it packs linear layers in 4 bits."""
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    own = AUTO_QUANTIZER_MAPPING[_METHOD]
    AUTO_QUANTIZER_MAPPING[_METHOD] = _quantizer_class()
    try:
        yield
    finally:
        AUTO_QUANTIZER_MAPPING[_METHOD] = own


@functools.cache
def _quantizer_class() -> type:
    from transformers.integrations.bitsandbytes import Bnb4bitQuantize
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

    class Pack(Bnb4bitQuantize):
        """Packs a tensor that has been read."""

        def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
            read = {
                name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()
            }
            names = self.hf_quantizer.names_of_experts
            packed = {name: pack(value) for name, value in read.items() if name in names}
            others = {name: value for name, value in read.items() if name not in names}
            return packed | (super().convert(others, *args, **kwargs) if others else {})

    class ExpertQuantizer(Bnb4BitHfQuantizer):
        """Packs each linear layer as bitsandbytes does, and the experts of each layer as soon as they are read."""

        def _process_model_before_weight_loading(
            self, model: PreTrainedModel, *args: Any, **kwargs: Any
        ) -> None:
            super()._process_model_before_weight_loading(model, *args, **kwargs)
            self.experts = dict(fused_experts(model))
            self.names_of_experts = {
                f"{name}.{weight}" for name, module in self.experts.items() for weight in weights_of(module)
            }

        def _process_model_after_weight_loading(
            self, model: PreTrainedModel, **kwargs: Any
        ) -> PreTrainedModel:
            dtype: Any = self.quantization_config.bnb_4bit_compute_dtype
            for module in self.experts.values():
                PackedExperts.install(module, dtype)
            return super()._process_model_after_weight_loading(model, **kwargs)

        def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
            return param_name in self.names_of_experts or super().param_needs_quantization(
                model, param_name, **kwargs
            )

        def get_quantize_ops(self) -> Pack:
            return Pack(self)

    return ExpertQuantizer
