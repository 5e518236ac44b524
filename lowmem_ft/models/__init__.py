"""Models and tokenizers: read from hub, folder or GGUF; written as vanilla checkpoints.

Names resolve on first use, so that reading a recipe (which needs only ``ModelConfig``) does not import torch.
"""

from typing import TYPE_CHECKING

from lowmem_ft.foundation.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lowmem_ft.models.config import ModelConfig
    from lowmem_ft.models.files.hub_names import hub_id_of
    from lowmem_ft.models.loading import (
        compute_dtype,
        load_model,
        load_model_config,
        load_tokenizer,
        max_positions,
        vocab_size,
        weights_dtype,
    )
    from lowmem_ft.models.master_weights import MasterWeights, load_master_weights
    from lowmem_ft.models.quantization import log_quantization, quantization_config, quantize_linear_layers
    from lowmem_ft.models.saving import save_config, save_model, save_tokenizer, verify_saved_model
    from lowmem_ft.models.sharded_weights import weights_in_shards
    from lowmem_ft.models.weights_on_disk import weights_in_files

__all__ = [
    "MasterWeights",
    "ModelConfig",
    "compute_dtype",
    "hub_id_of",
    "load_master_weights",
    "load_model",
    "load_model_config",
    "load_tokenizer",
    "log_quantization",
    "max_positions",
    "quantization_config",
    "quantize_linear_layers",
    "save_config",
    "save_model",
    "save_tokenizer",
    "verify_saved_model",
    "vocab_size",
    "weights_dtype",
    "weights_in_files",
    "weights_in_shards",
]

__getattr__ = lazy_exports(__name__)
