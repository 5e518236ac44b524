"""The keys of techniques, other values of each, and what a value needs beside it to be allowed, or to matter."""

from __future__ import annotations

from typing import Any

from lowmem_ft.recipe.reading.keys import recipe_keys

KEYS = {
    path: key
    for path, key in recipe_keys().items()
    if key.config_class.__module__.startswith("lowmem_ft.techniques.") and not path.startswith("distributed.")
}
"""Of one process; ``test_fsdp2.py`` has those of several."""
del KEYS["adapter.train_new_tokens"]  # needs a tokenizer: see test_trained_rows.py
KEYS["optimizer.in_backward"] = recipe_keys()["optimizer.in_backward"]

VALUES = {
    "checkpointing.mode": ["full", "selective"],
    "offload.folder": ["{folder}"],
    "adapter.target_modules": ["[q_proj]"],
    "adapter.target_parameters": ["[experts.gate_up_proj]"],
    "adapter.modules_to_save": ["[embed_tokens]", "[lm_head]"],
}
"""Values that a key's type does not tell; checkpointing.mode=auto has become another before anything is built."""

_FULL = ("checkpointing.mode=full",)
_VERTICAL = (*_FULL, "accumulation.order=vertical")
_HOST = ("offload.optimizer=host",)
STREAMED = (*_VERTICAL, *_HOST, "optimizer.in_backward=true")
BESIDE: dict[str, tuple[str, ...]] = {
    "checkpointing.every_n_layers": _FULL,
    "checkpointing.skip_last_layers": _FULL,
    "offload.activations": _FULL,
    "offload.parameters": STREAMED,
    "offload.resident_layers": (*STREAMED, "offload.parameters=stream"),
    "offload.folder": _HOST,
    "accumulation.order": _FULL,
    "accumulation.dtype": ("model.dtype=bfloat16",),
    "accumulation.fusion": ("model.dtype=bfloat16",),
    "optimizer.in_backward": _VERTICAL,
    **{
        path: ("adapter.name=lora",)
        for path in KEYS
        if path.startswith("adapter.") and path != "adapter.name"
    },
    "adapter.target_parameters": ("adapter.name=lora", "model={folder}/mixtral"),
}
"""What a key needs to be allowed, or to matter."""


def other_values(path: str) -> list[Any]:
    """Values of a technique's key that are not its default."""
    key = recipe_keys()[path]
    if path in VALUES:
        return VALUES[path]
    if key.choices:
        return [choice for choice in key.choices if choice != key.default]
    if isinstance(key.default, bool):
        return [str(not key.default).lower()]
    assert isinstance(key.default, int | float), f"{path} needs its values in VALUES"
    return [key.default + (1 if isinstance(key.default, int) else 0.1)]
