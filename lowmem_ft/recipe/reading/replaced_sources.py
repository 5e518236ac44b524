"""Keys of a recipe that describe its data set or its model, and mean nothing for another one.

A recipe that names UltraChat also names UltraChat's splits. A user who sets ``data=my_chats.jsonl`` replaces the data
set, and its splits, revision and columns with it, unless the same layer (the command line, or a file with a ``base``)
sets them too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_OF_DATA = (
    "data.name",
    "data.revision",
    "data.data_files",
    "data.split",
    "data.sample_by",
    "data.format",
    "data.messages_column",
    "data.prompt_column",
    "data.input_column",
    "data.completion_column",
    "data.text_column",
    "data.eval_path",
    "data.eval_split",
    "data.stopping_strategy",
)

OF_A_SOURCE: dict[str, tuple[str, ...]] = {
    "data.path": ("data.sources", *_OF_DATA),
    "data.sources": ("data.path", *_OF_DATA),
    "data.eval_path": ("data.eval_split",),
    "model.name_or_path": (
        "model.revision",
        "model.gguf_file",
        "model.tokenizer_name_or_path",
        "model.trust_remote_code",
    ),
}
"""For each key that names a source, the keys that say how to read that particular source."""

_INSTEAD = {"data.eval_path": "data.path", "data.path": "data.sources", "data.sources": "data.path"}
"""The key whose source is used where a source is not named."""

_HELD_OUT = ("data.eval_path", "data.eval_split", "data.eval_size")
_OF_HELD_OUT = (
    *("training.eval_steps", "training.eval_on_start", "training.load_best_model_at_end"),
    *("training.metric_for_best_model", "training.greater_is_better"),
    *("training.early_stopping_patience", "training.early_stopping_threshold"),
)
_OF_PROMPTS = ("training.eval_generations", "training.max_new_tokens")


@dataclass(frozen=True, kw_only=True)
class Replaced:
    """A source that a later layer replaced.

    Args:
        key: the key that names the source, such as ``data.path``.
        before: the replaced source.
        now: the source that replaces it.
        dropped: the keys, with their values, that were dropped with it.
    """

    key: str
    before: str
    now: str
    dropped: Mapping[str, Any]

    def __str__(self) -> str:
        dropped = ", ".join(f"{key}={value}" for key, value in self.dropped.items())
        return f"{self.key}={self.now} replaces {self.before}, and the settings for that, {dropped}, are ignored."


def replaced_by(earlier: Mapping[str, Any], layer: Mapping[str, Any]) -> list[Replaced]:
    """Return the sources of earlier layers that a layer replaces, with the keys that go with them.

    Args:
        earlier: values by dotted key, of all layers before.
        layer: values by dotted key.

    Returns:
        One entry for each replaced source that has such keys. A schedule of evaluations goes with the last held-out
        data.
    """
    replaced = []
    for key, described in OF_A_SOURCE.items():
        before, now = earlier.get(key) or earlier.get(_INSTEAD.get(key, "")), layer.get(key)
        if before is None or now is None or before == now:
            continue
        gone = {name for source in replaced for name in source.dropped}
        dropped = {name: earlier[name] for name in described if name in earlier.keys() - layer.keys() - gone}
        if any(name in dropped for name in _HELD_OUT):
            dropped |= _evaluation_without_data(earlier, layer, dropped)
        if dropped:
            replaced.append(Replaced(key=key, before=before, now=now, dropped=dropped))
    return replaced


def _evaluation_without_data(
    earlier: Mapping[str, Any], layer: Mapping[str, Any], dropped: Mapping[str, Any]
) -> dict[str, Any]:
    """Return earlier layers' schedule of evaluations, if neither they nor this layer name other held-out data."""
    kept = {**{name: value for name, value in earlier.items() if name not in dropped}, **layer}
    if any(kept.get(name) is not None for name in _HELD_OUT):
        return {}
    has_prompts = kept.get("training.generation_prompts") is not None
    gone = _OF_HELD_OUT if has_prompts else (*_OF_HELD_OUT, *_OF_PROMPTS)
    return {name: earlier[name] for name in gone if name in earlier and name not in layer}
