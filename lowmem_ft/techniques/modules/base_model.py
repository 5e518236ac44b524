"""The model inside PEFT's wrapper, whose forward calls it."""

from __future__ import annotations

from typing import Any


def base_model(model: Any) -> Any:
    """Return the causal LM itself, with its adapters; a model without PEFT's wrapper is returned as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
