"""The model architectures of the catalogue: one file per model in ``models/``, under the name that users type.

To add one, write ``models/NAME.json``: ``config`` is the hub's config.json, ``published_parameters`` the count that a
test compares with the model built from it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One model of the catalogue.

    Args:
        name: name that users type, such as ``llama-3.1-8b``.
        hub_id: the hub repository that the name stands for.
        variants: other hub repositories of this architecture, each with the config fields in which it differs.
        license: the hub's name of the licence.
        gated: whether the hub asks users to accept a licence before it hands out any file.
        published_parameters: the count that the authors or the hub publish.
        published_also_counts: parts of that count that are not parameters of the model, such as a tied head stored
            twice.
        published_active_parameters: a mixture's parameters per token as its authors count them, with or without the
            embedding; None: they publish no such count, or the model has no experts.
        sources: where the published counts and ``config`` come from.
        config: the hub's config.json.
    """

    name: str
    hub_id: str
    variants: Mapping[str, Mapping[str, Any]]
    license: str
    gated: bool
    published_parameters: int
    published_also_counts: Mapping[str, int]
    published_active_parameters: int | None
    sources: Mapping[str, str]
    config: Mapping[str, Any]

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the model; a tied one counts once."""
        return self.published_parameters - sum(self.published_also_counts.values())

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The config of the language model; for a model that also sees images, the part for text."""
        return self.config.get("text_config", self.config)

    def config_of(self, hub_id: str) -> dict[str, Any]:
        """Return the config.json of one of the hub repositories; capitals do not matter."""
        differences = {variant.lower(): fields for variant, fields in self.variants.items()}
        return {**self.config, **differences.get(hub_id.lower(), {})}


@functools.cache
def load_architectures() -> Mapping[str, Architecture]:
    """Return every architecture of the catalogue by its name; sorted by maker, the smallest first."""
    files = (resources.files("lowmem_ft.foundation.catalog") / "models").iterdir()
    architectures = [
        _architecture(file.name.removesuffix(".json"), json.loads(file.read_text(encoding="utf-8")))
        for file in files
        if file.name.endswith(".json")
    ]
    architectures.sort(
        key=lambda found: (found.hub_id.split("/")[0].lower(), found.num_parameters, found.name)
    )
    return MappingProxyType({found.name: found for found in architectures})


def find_architecture(name_or_hub_id: str) -> Architecture | None:
    """Return the architecture of a catalogue name or of a hub id, in any capitals; None if the catalogue lacks it."""
    return _architectures_by_any_name().get(name_or_hub_id.lower())


@functools.cache
def _architectures_by_any_name() -> Mapping[str, Architecture]:
    return {
        any_name.lower(): architecture
        for architecture in load_architectures().values()
        for any_name in (architecture.name, architecture.hub_id, *architecture.variants)
    }


def _architecture(name: str, row: dict[str, Any]) -> Architecture:
    optional: dict[str, Any] = {"published_also_counts": {}, "published_active_parameters": None}
    return Architecture(name=name, **optional | row)
