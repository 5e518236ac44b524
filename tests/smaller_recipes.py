"""Programs with a recipe for a GPU, run on a processor: in front of them a model and a step that it has room for."""

from __future__ import annotations

import json
from pathlib import Path

TINY = Path(__file__).parents[1] / "recipes" / "tiny"
_WITH_SMALLER_RECIPES = f"""
import lowmem_ft

whole = lowmem_ft.load_recipe
smaller = ["model={TINY}", "model.weights=random", "model.dtype=float32", "training.mixed_precision=no"]
smaller += ["data.max_length=32", "training.max_steps=1", "training.gradient_accumulation_steps=1"]
smaller += ["training.use_cpu=true", "checkpointing.skip_last_layers=0", "model.kernels=none"]
lowmem_ft.load_recipe = lambda name, settings=(): whole(name, [*settings, *smaller])
"""


def with_smaller_recipes(program: str, folder: Path, chats: str) -> str:
    """Return a program to run in a folder, into which a file of chats is written."""
    turns = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two."}]
    (folder / chats).write_text(60 * (json.dumps({"messages": turns}) + "\n"), "utf-8")
    return _WITH_SMALLER_RECIPES + program
