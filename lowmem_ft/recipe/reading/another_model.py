"""Values of a recipe that go by the size of its own model, made right for another model.

7b-lora leaves the last 19 of Qwen2.5-7B's 28 layers without checkpoints. A user who sets ``model=pythia-160m`` has 12
layers, and means 8 of them. What the user, or any later layer than the one that names the model, sets stays as it
is, and is refused if the model cannot have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.files.model_files import limit_of_positions, num_layers_of, text_fields
from lowmem_ft.recipe.reading.keys import recipe_keys
from lowmem_ft.recipe.tree import Recipe

_MODEL, _LENGTH = "model.name_or_path", "data.max_length"
_WHERE = {_MODEL: "name_or_path", "model.revision": "revision", "model.gguf_file": "gguf_file"}


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A value of a recipe that was for its own model, and the value for the model that replaces that.

    Args:
        key: the recipe key.
        before: the recipe's value.
        now: the value for the other model.
        reason: the sizes that decide, as the end of a sentence.
    """

    key: str
    before: int
    now: int
    reason: str

    @property
    def setting(self) -> str:
        """The new value as a user types it."""
        return f"{self.key}={self.now}"

    def __str__(self) -> str:
        return f"{self.setting}, not the recipe's {self.before}: {self.reason}."


def layers_for(value: int, *, of_layers: int, num_layers: int) -> int:
    """Return the number of last layers that is the same share of another model's layers, rounded down.

    Args:
        value: the number of layers of the recipe's own model.
        of_layers: all layers of that model.
        num_layers: all layers of the other model.
    """
    return int(value / of_layers * num_layers)


def fitted_in(recipe: Recipe) -> list[str]:
    """Return the sentences on values that were made right for a recipe's model, where it still has them."""
    return [
        sentence
        for setting, sentence in recipe.fitted.items()
        if recipe_keys()[setting.partition("=")[0]].setting_in(recipe) == setting
    ]


def fitted_to_model(earlier: Mapping[str, Any], layer: Mapping[str, Any]) -> list[Fitted]:
    """Return the values of earlier layers that a layer's model takes otherwise.

    The models' files or the catalogue tell their sizes; where they do not, nothing is changed.

    Args:
        earlier: values by dotted key, of all layers before.
        layer: values by dotted key.
    """
    before, now = earlier.get(_MODEL), layer.get(_MODEL)
    if before is None or now is None or before == now:
        return []
    return [*_fitted_layers(earlier, layer), *_fitted_length(earlier, layer)]


def _fitted_layers(earlier: Mapping[str, Any], layer: Mapping[str, Any]) -> Iterator[Fitted]:
    counts = [
        path
        for path, key in recipe_keys().items()
        if key.counts_layers == "last" and earlier.get(path) and path not in layer
    ]
    if not counts:
        return
    of_layers, num_layers = num_layers_of(_fields(earlier).get), num_layers_of(_fields(layer).get)
    if of_layers is None or num_layers is None:
        return
    for path in counts:
        value = layers_for(earlier[path], of_layers=of_layers, num_layers=num_layers)
        if value != earlier[path]:
            reason = f"{layer[_MODEL]} has {num_layers} layers, {earlier[_MODEL]} {of_layers}"
            yield Fitted(key=path, before=earlier[path], now=value, reason=reason)


def _fitted_length(earlier: Mapping[str, Any], layer: Mapping[str, Any]) -> Iterator[Fitted]:
    length = earlier.get(_LENGTH)
    if length is None or _LENGTH in layer:
        return
    limit = limit_of_positions(_fields(layer).get)
    if limit is not None and limit < length:
        yield Fitted(
            key=_LENGTH, before=length, now=limit, reason=f"{layer[_MODEL]} takes up to {limit} tokens"
        )


def _fields(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the text part of the config of the model that a layer names; empty if it is not known."""
    return text_fields(ModelConfig(**{name: layer[path] for path, name in _WHERE.items() if path in layer}))
