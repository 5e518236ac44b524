"""Architectures known without weights: catalogue names, and checks for incomplete config.json files."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from lowmem_ft.catalog.architectures import find_architecture
from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.files.hub_names import hub_id_of
from lowmem_ft.upstream.layer_configs import layer_configs

logger = logging.getLogger(__name__)

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def catalogue_config(config: ModelConfig) -> PretrainedConfig | None:
    """Return the catalogue's architecture, whole; None if it lacks this model, or this revision of it.

    A local folder of the same name takes precedence, as everywhere.
    """
    name = config.name_or_path or ""
    found = find_architecture(name)
    if found is None or config.revision or config.gguf_file or Path(name).is_dir():
        return None
    fields = found.config_of(name)
    hf_config = CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
    hf_config.name_or_path = hub_id_of(name)
    logger.info(
        ("The architecture of %s comes from the catalogue: there is no download, and no licence to accept."),
        name,
    )
    return hf_config


def refuse_incomplete(name: str, written: Mapping[str, Any], hf_config: PretrainedConfig) -> None:
    """Reject a config.json without the sizes of its model: transformers fills in those of some other model.

    Args:
        name: the folder or hub id that it was read from.
        written: the file's own fields.
        hf_config: the config that transformers made of them.

    Raises:
        ModelError: if a size is not in the file; names all that are missing.
    """
    model_type = hf_config.model_type
    own_code = model_type not in CONFIG_MAPPING or type(hf_config) is not CONFIG_MAPPING[model_type]
    if own_code or "text_config" in written:
        return  # remote code, and models of several parts, may know their sizes
    defaults = type(hf_config)()
    stored = (
        defaults.to_dict()
    )  # some have a size from another field: Nemotron-H counts its `layers_block_type`
    first, first_by_default = (layer_configs(config)[0] for config in (hf_config, defaults))
    missing = [
        field
        for field in SIZES
        if hasattr(first, field)
        and (own := hf_config.attribute_map.get(field, field)) in stored
        and not {field, own} & written.keys()
        # If the file has the size under an old name (bloom's n_embed), it differs from the default's.
        and getattr(first, field) == getattr(first_by_default, field)
    ]
    if missing:
        raise ModelError(
            f"A config.json must give {', '.join(SIZES)}; that of {name} lacks {', '.join(missing)}. Add the fields, "
            "or take the config.json of the model's original repository."
        )
