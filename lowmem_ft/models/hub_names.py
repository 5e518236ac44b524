"""Names of models on the hub: what they are short for, which are spelt alike, and whether they can be read at all."""

from __future__ import annotations

from lowmem_ft.catalog import find_architecture, load_architectures
from lowmem_ft.errors import ModelError, did_you_mean
from lowmem_ft.hub import OFFLINE_ADVICE, hub_is_reachable
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.user_paths import expand_user


def hub_id_of(name: str) -> str:
    """The hub id that a catalogue name stands for; any other name unchanged."""
    found = None if "/" in name else find_architecture(name)
    return found.hub_id if found else name


def nearest_names(name: str) -> str:
    """A suffix with the catalogue's names, or hub ids, that are closest to an unknown one; empty if none is close."""
    if find_architecture(name):
        return ""
    architectures = load_architectures().values()
    if "/" not in name:
        return did_you_mean(name.lower(), [found.name for found in architectures])
    return did_you_mean(
        name, [hub_id for found in architectures for hub_id in (found.hub_id, *found.variants)]
    )


def out_of_reach(name: str) -> ModelError:
    """The error for a hub id of which nothing is on this machine, where the hub does not answer."""
    return ModelError(
        f"{name} is neither a local folder nor in the hub's cache, and the hub is out of reach."
        f"{nearest_names(name)} {OFFLINE_ADVICE} An estimate of a model that `lowmem-ft models` lists needs no hub."
    )


def require_within_reach(config: ModelConfig) -> None:
    """Refuse a hub id of which nothing is on this machine, where the hub does not answer; paths pass.

    Raises:
        ModelError: if no file of it can be had.
    """
    name = config.name_or_path or ""
    path = expand_user(name)
    if not name or path.exists() or path.suffix == ".gguf":
        return
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(
            hub_id_of(name), config.gguf_file or "config.json", revision=config.revision
        )
    except HFValidationError:
        return  # transformers says what is wrong with the name
    if not isinstance(cached, str) and not hub_is_reachable():
        raise out_of_reach(hub_id_of(name))
