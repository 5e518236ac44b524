"""Names of models on the hub: catalogue names, suggestions for misspelt ones, and checks that they can be read."""

from __future__ import annotations

from collections.abc import Sequence

from lowmem_ft.foundation.catalog.model_architectures import find_architecture, load_architectures
from lowmem_ft.foundation.errors import ModelError, did_you_mean
from lowmem_ft.foundation.hub_connection import OFFLINE_ADVICE, hub_is_reachable
from lowmem_ft.foundation.user_paths import expand_user
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.files.local_paths import not_a_tokenizer


def hub_id_of(name: str) -> str:
    """Return the hub id for a catalogue name; any other name unchanged."""
    found = None if "/" in name else find_architecture(name)
    return found.hub_id if found else name


def nearest_names(name: str) -> str:
    """Return a suffix with the catalogue names or hub ids closest to an unknown one; empty if none is close."""
    if find_architecture(name):
        return ""
    architectures = load_architectures().values()
    if "/" not in name:
        return did_you_mean(name.lower(), [found.name for found in architectures])
    return did_you_mean(
        name, [hub_id for found in architectures for hub_id in (found.hub_id, *found.variants)]
    )


def out_of_reach(name: str) -> ModelError:
    """Return the error for a hub id with no file on this machine while the hub does not answer."""
    return ModelError(
        f"{name} is neither a local folder nor in the hub's cache, and the hub cannot be "
        f"reached.{nearest_names(name)} {OFFLINE_ADVICE} An estimate of a model that `lowmem-ft models` lists needs "
        "no hub."
    )


def require_within_reach(config: ModelConfig) -> None:
    """Reject a hub id with no file on this machine if the hub does not answer; paths pass.

    Raises:
        ModelError: if no file of it is available.
    """
    name = config.name_or_path or ""
    if expand_user(name).suffix == ".gguf":
        return
    if not _may_be_had(name, [config.gguf_file or "config.json"], config.revision):
        raise out_of_reach(hub_id_of(name))


def require_tokenizer_within_reach(config: ModelConfig) -> None:
    """Apply the same check to ``model.tokenizer_name_or_path``.

    Raises:
        ModelError: if no file of it is available.
    """
    name = config.tokenizer_name_or_path or ""
    if not _may_be_had(name, ["tokenizer.json", "tokenizer_config.json", "config.json"], None):
        raise not_a_tokenizer(
            name, "it is neither a local folder nor in the hub's cache, and the hub cannot be reached."
        )


def _may_be_had(name: str, files: Sequence[str], revision: str | None) -> bool:
    """Return whether a hub id is cached or the hub answers; paths, and names that are no id, pass."""
    if not name or expand_user(name).exists():
        return True
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = (try_to_load_from_cache(hub_id_of(name), file, revision=revision) for file in files)
        return any(isinstance(found, str) for found in cached) or hub_is_reachable()
    except HFValidationError:
        return True  # transformers reports what is wrong with the name
