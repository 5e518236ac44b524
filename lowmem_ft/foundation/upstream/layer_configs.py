"""The configs of a model's layers, which differ in transformers' heterogeneous models such as Gemma 4."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def layer_configs(config: Any) -> Sequence[Any]:
    """Return the config of each layer, or only the model's own config if all layers share it.

    A heterogeneous config refuses to give a field that differs between layers (``head_dim``), with an error that
    neither ``hasattr`` nor the default of ``getattr`` handles. Whoever reads a field that a layer may have of its own
    reads it from these.

    Args:
        config: the config of a text model, of any version of transformers or of remote code.
    """
    return list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config]
