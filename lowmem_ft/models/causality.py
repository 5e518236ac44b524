"""Check that an architecture predicts each token only from the ones before it.

transformers has a causal LM class for many encoders too, which are causal only if their config says ``is_decoder``.
Trained without it, they see the very token that they are to predict.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING

from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.models.files.model_files import not_causal

_NEITHER_CONFIG_NOR_MODULES_TELL = {
    "cpmant": "whose causal LM lets every token see all others",
    "xlnet": "trained on permutations: without a mask for each permutation, every token sees all others",
}


def refuse_bidirectional(name: str, hf_config: PretrainedConfig) -> None:
    """Reject encoders, encoder-decoders, and decoders whose attention is switched to both directions.

    Not every config shows it, least of all those of models with remote code: ``training/step/causality_check.py``
    checks the weights.

    Args:
        name: the model's name in the recipe.
        hf_config: its architecture; transformers has a causal LM class for it.

    Raises:
        ModelError: if a token of this architecture sees the ones after it.
    """
    reason = _bidirectional_by(hf_config)
    if reason:
        raise ModelError(not_causal(name, hf_config.model_type, reason))


def _bidirectional_by(hf_config: PretrainedConfig) -> str:
    """Return what makes it bidirectional; empty if nothing does."""
    if hf_config.is_encoder_decoder:
        return "an encoder-decoder (is_encoder_decoder=true in its config.json)"
    if reason := _NEITHER_CONFIG_NOR_MODULES_TELL.get(hf_config.model_type):
        return reason
    text: Any = hf_config.get_text_config(decoder=True)
    if getattr(text, "is_causal", None) is False or text.to_dict().get("use_bidirectional_attention") in (
        True,
        "all",
    ):
        return "and its config.json switches attention to both directions (is_causal, use_bidirectional_attention)"
    # XLM says `causal`.
    if getattr(text, "is_decoder", False) or getattr(text, "causal", False):
        return ""
    if type(text) in MODEL_FOR_MASKED_LM_MAPPING or _is_an_encoder_without_switch(text):
        return "an encoder (a model that was trained as a decoder says is_decoder=true in its config.json)"
    return ""


def _is_an_encoder_without_switch(hf_config: Any) -> bool:
    """Return whether ``is_decoder=false`` has an effect on the modules: GPT-NeoX has the field, and never reads it."""
    if getattr(hf_config, "is_decoder", None) is not False:
        return False
    if type(hf_config) not in AutoModelForCausalLM._model_mapping:
        return False  # remote code: its weights are checked
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config, trust_remote_code=False)
    return any(getattr(module, "is_causal", None) is False for module in model.modules())
