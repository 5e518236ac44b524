"""Test of whether a model's loss is the one that ``loss.chunk_tokens`` computes, on a small model with real values.

A model that is only traced has no values to compare. Its class, its config and a small vocabulary make one that has:
only the parts around the layers are compared, and the layers stay on the meta device.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch

from lowmem_ft.techniques.loss.chunked_loss import enable_chunked_loss
from lowmem_ft.techniques.loss.config import LossConfig
from lowmem_ft.techniques.modules.model_parts import ModelParts, base_model

logger = logging.getLogger(__name__)

NUM_WORDS = 64


class LossProbe:
    """The parts of a model that a later test needs, without the model itself.

    Args:
        model: a causal LM of transformers or any other model of theirs, in PEFT's wrapper or not.
    """

    def __init__(self, model: Any) -> None:
        causal_lm = base_model(model)
        self._model_class = type(causal_lm)
        self._config = _with_few_words(causal_lm.config)

    def can_be_chunked(self) -> bool:
        """Check whether ``enable_chunked_loss`` would take the model; False if its config makes no small one."""
        try:
            with torch.random.fork_rng(devices=[]):
                small = _around_the_layers(self._model_class, self._config)
                enable_chunked_loss(small, LossConfig(), device=torch.device("meta")).remove()
        except Exception:  # an unusual config, run through arbitrary model code
            logger.debug("loss.chunk_tokens is left out.", exc_info=True)
            return False
        return True


def _with_few_words(config: Any) -> Any:
    config = copy.deepcopy(config)
    text_config = config.get_text_config()
    text_config.vocab_size = NUM_WORDS
    for name, value in vars(text_config).items():
        if name.endswith("_token_id") and isinstance(value, int) and value >= NUM_WORDS:
            setattr(text_config, name, 0)
    return config


def _around_the_layers(model_class: Any, config: Any) -> Any:
    """Return a model with real values in all modules except its layers."""
    with torch.device("meta"):
        model = model_class(config)
    parts = ModelParts(model)
    text = parts.text_layers()
    layers = list(text)
    for stack in parts.stacks.values():  # text alone passes by towers
        del stack[:]
    model.to_empty(device="cpu")
    model.init_weights()
    text.extend(layers)
    return model
