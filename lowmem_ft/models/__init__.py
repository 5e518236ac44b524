"""Models and tokenizers: read from hub, folder or GGUF; written as vanilla checkpoints."""

from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.loading import (
    compute_dtype,
    load_model,
    load_model_config,
    load_tokenizer,
    max_positions,
    weights_dtype,
)
from lowmem_ft.models.saving import save_model, verify_saved_model

__all__ = [
    "ModelConfig",
    "compute_dtype",
    "load_model",
    "load_model_config",
    "load_tokenizer",
    "max_positions",
    "save_model",
    "verify_saved_model",
    "weights_dtype",
]
