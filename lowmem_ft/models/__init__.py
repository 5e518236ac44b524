"""Models and tokenizers: read from hub, folder or GGUF; written as vanilla checkpoints.

Names resolve on first use, so that reading a recipe (which needs ``ModelConfig`` alone) does not import torch.
"""

from typing import TYPE_CHECKING

from lowmem_ft.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lowmem_ft.models.config import ModelConfig
    from lowmem_ft.models.loading import (
        compute_dtype,
        load_model,
        load_model_config,
        load_tokenizer,
        max_positions,
        vocab_size,
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
    "vocab_size",
    "weights_dtype",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "ModelConfig": "config",
        "compute_dtype": "loading",
        "load_model": "loading",
        "load_model_config": "loading",
        "load_tokenizer": "loading",
        "max_positions": "loading",
        "save_model": "saving",
        "verify_saved_model": "saving",
        "vocab_size": "loading",
        "weights_dtype": "loading",
    },
)
