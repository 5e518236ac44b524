"""Architectures known without weights: catalogue names, and checks for incomplete config.json files."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from lowmem_ft.foundation.catalog.model_architectures import find_architecture
from lowmem_ft.foundation.errors import ModelError, raise_problems
from lowmem_ft.foundation.upstream.layer_configs import layer_configs
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.files.hub_names import hub_id_of

logger = logging.getLogger(__name__)

_ROUTER_LOSS = ("router_aux_loss_coef", "aux_loss_coef")
"""Fields of configs for the weight of the routers' load-balancing loss: Mixtral's and most others', JetMoE's."""

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_top_k", "moe_topk", "moe_k", "top_k_experts")
"""Fields of configs for the experts of a layer, and those of them that a token passes."""

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
            "or copy config.json from the model's original repository."
        )


def refuse_odd_routing(name: str, hf_config: PretrainedConfig) -> None:
    """Reject a mixture's config by which no token can choose its experts, or whose routers' loss is no loss.

    Args:
        name: the folder or hub id that it was read from.
        hf_config: the model's config.

    Raises:
        ModelError: names the fields.
    """
    # An encoder-decoder, which is refused later by its name, may have a text config for each of its two parts.
    raise_problems(_routing_problems(name, hf_config.get_text_config(decoder=True)), ModelError)


def refuse_draft_model(name: str, hf_config: PretrainedConfig) -> None:
    """Reject a model whose layers all read the keys and values of another model, for which it drafts tokens.

    Args:
        name: the folder or hub id that it was read from.
        hf_config: the config of all its parts.

    Raises:
        ModelError: names the field.
    """
    text = hf_config.get_text_config(decoder=True)
    shared, layers = getattr(text, "num_kv_shared_layers", None) or 0, getattr(text, "num_hidden_layers", 0)
    if 0 < layers <= shared:
        raise ModelError(
            f"model.name_or_path needs a model that computes its own keys and values, but {name} is of type "
            f"{hf_config.model_type!r}, a draft model: all of its {layers} layers read those of the model that it "
            f"drafts for (num_kv_shared_layers={shared} in its config.json). Train that model."
        )


def _routing_problems(name: str, text: PretrainedConfig) -> Iterator[str]:
    way_out = "Correct the field, or copy config.json from the model's original repository."
    for part in (text, getattr(text, "ffn_config", None)):  # DBRX's are a part of their own
        names = getattr(part, "attribute_map", {})
        (experts, number), (per_token, chosen) = (
            next(
                (
                    (names.get(field, field), value)
                    for field in fields
                    if type(value := getattr(part, field, None)) is int
                ),
                ("", None),
            )
            for fields in (_EXPERTS, _CHOSEN)
        )
        # With one expert, or none, some families have plain layers.
        if number is not None and chosen is not None and number > 1 and not 1 <= chosen <= number:
            yield (
                f"Each token must go to at least 1 expert and at most {experts}={number}, but the config.json of "
                f"{name} has {per_token}={chosen}. {way_out}"
            )
    for field in _ROUTER_LOSS:
        weight = getattr(text, field, None)
        if isinstance(weight, (int, float)) and not (math.isfinite(weight) and weight >= 0):
            yield (
                f"The weight of a load-balancing loss must be finite and at least 0, but the config.json of {name} has "
                f"{field}={weight}. {way_out}"
            )
