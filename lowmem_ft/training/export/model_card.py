"""The model card of a finished model, in the hub's format: its sources, settings and results.

Others will read it, so it names nothing of this machine: a local path would tell them nothing.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.repocard import metadata_load

from lowmem_ft.data.files.files import is_hub_name
from lowmem_ft.data.sources.listed import listed_sources
from lowmem_ft.foundation.memory.comparison import Row
from lowmem_ft.foundation.user_paths import expand_user
from lowmem_ft.models.files.hub_names import hub_id_of
from lowmem_ft.models.files.local_paths import looks_like_a_path
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.reading.keys import recipe_keys
from lowmem_ft.recipe.reading.references import escape_references
from lowmem_ft.training.evaluation.held_out_loss import EvaluationResult
from lowmem_ft.training.folder.generations_file import BeforeAndAfter

_OF_THIS_MACHINE = {
    "name",
    "description",
    "model.name_or_path",
    "model.tokenizer_name_or_path",
    "data.path",
    "data.eval_path",
    "data.data_files",
    "data.chat_template",
    "data.num_proc",
    "offload.folder",
    "training.output_dir",
    "training.overwrite_output_dir",
    "training.resume_from_checkpoint",
    "training.eval_generations",
    "training.generation_prompts",
    "training.max_new_tokens",
    "training.report_to",
    "training.project",
    "training.run_name",
    "training.push_to_hub",
    "training.hub_model_id",
    "training.hub_private_repo",
    "training.logging_steps",
    "training.save_steps",
    "training.save_total_limit",
}
"""Settings that change no number of the result, or that the model card's text already has: it does not list them."""

_CELL_CHARACTERS = 400
"""Characters of a prompt or an answer that a model card shows."""

_ALWAYS = {"training.learning_rate", "training.per_device_train_batch_size", "optimizer.name"}
_ALWAYS_OF_ADAPTERS = {"adapter.r", "adapter.lora_alpha", "adapter.target_modules"}
"""Settings that a reader looks for, listed even at their defaults."""


def model_card(
    recipe: Recipe,
    *,
    steps: int,
    tokens: int,
    loss: float | None,
    evaluation: EvaluationResult | None,
    best_step: int | None = None,
    memory: Sequence[Row] = (),
    generations: Sequence[BeforeAndAfter] = (),
) -> str:
    """Return a model card with the metadata that the hub looks for.

    Args:
        recipe: the recipe that was trained.
        steps: optimizer steps taken.
        tokens: tokens seen.
        loss: training loss of the last step, in nats per label token.
        evaluation: result on the held-out data, if there was any.
        best_step: the step whose weights these are, because its evaluation was the best; None: the last one.
        memory: the run's measured memory and its estimate.
        generations: answers before and after training.

    Returns:
        Markdown with YAML front matter.
    """
    base, data = _hub_model(recipe), _hub_datasets(recipe)
    is_adapter = recipe.adapter.name != "none"
    metadata: Any = ModelCardData(
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        base_model=base,
        base_model_relation=None if base is None else "adapter" if is_adapter else "finetune",
        datasets=data or None,
        tags=["lowmem_ft", *(["lora"] if is_adapter else [])],
        **_licence(recipe),
    )
    on = ", ".join(map(_quoted, data)) or "local data"
    results = _results(steps, tokens, loss, evaluation, best_step, memory)
    rows = "\n".join(f"| {name} | {value} |" for name, value in results.items())
    return f"""---
{metadata.to_yaml()}
---

# {recipe.name}

{"LoRA adapters fine-tuned" if is_adapter else "Fine-tuned"} from {_named(base, "a local model")} on
{on} with lowmem_ft, torch {torch.__version__} and transformers {transformers.__version__}.

| result | |
|---|---|
{rows}
{_answers(generations)}
## Settings

All other settings have lowmem_ft's defaults:

```yaml
{yaml.safe_dump(escape_references(_chosen_settings(recipe)), sort_keys=False, allow_unicode=True).strip()}
```
"""


def _results(
    steps: int,
    tokens: int,
    loss: float | None,
    evaluation: EvaluationResult | None,
    best_step: int | None,
    memory: Sequence[Row],
) -> dict[str, str]:
    """Return the rows of the table of results."""
    results = {"optimizer steps": f"{steps:,}", "tokens seen": f"{tokens:,}"}
    if best_step is not None:
        results["step of these weights, the best evaluated"] = f"{best_step:,}"
    if loss is not None:
        results["training loss of the last step"] = f"{loss:.4f}"
    if evaluation is not None:
        results["held-out loss (nats per token)"] = f"{evaluation.loss:.4f}"
        results["held-out perplexity"] = f"{evaluation.perplexity:.2f}"
    return results | {
        row.name: _measured(row) for row in memory if row.measured and not row.is_part and not row.is_time
    }


def _answers(generations: Sequence[BeforeAndAfter]) -> str:
    """Return a section with the answers before and after training; empty without any."""
    if not generations:
        return ""
    first, last = generations[0].steps
    rows = "\n".join(
        f"| {_in_cell(one.prompt)} | {_in_cell(one.before)} | {_in_cell(one.after)} |" for one in generations
    )
    return f"\n## Answers\n\n| prompt | at step {first} | at step {last} |\n|---|---|---|\n{rows}\n"


def _in_cell(text: str | None) -> str:
    """Return text for one cell of a table in Markdown, at most so long that a row can be read."""
    if text is None:
        return "-"
    shown = text if len(text) <= _CELL_CHARACTERS else f"{text[:_CELL_CHARACTERS]}..."
    return html.escape(shown, quote=False).replace("|", "\\|").replace("\n", "<br>")


def _measured(row: Row) -> str:
    if row.error is None:
        return row.text(row.measured)
    return f"{row.text(row.measured)} (estimated before the run: {row.text(row.estimated)}, {row.error:+.1%})"


def merged_model_card(name: str, adapter: Path, base: str) -> str:
    """Return the model card of a merged model: its base, and the adapter's own model card.

    Args:
        name: the merged model's name.
        adapter: the adapter's folder, perhaps with a model card.
        base: hub id or folder that the weights came from.

    Returns:
        Markdown with YAML front matter.
    """
    of_adapter = adapter / "README.md"
    told, base_id = _metadata(of_adapter), _hub_id(base)
    metadata: Any = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=base_id or told.get("base_model"),
        base_model_relation="finetune" if base_id or told.get("base_model") else None,
        datasets=told.get("datasets"),
        tags=["lowmem_ft"],
        **(_licence_in(told) or _licence_in(_metadata(expand_user(base) / "README.md"))),
    )
    text = f"""---
{metadata.to_yaml()}
---

# {name}

{_named(base_id, "A local model")} with LoRA adapters added to its
weights by lowmem_ft, torch {torch.__version__} and transformers {transformers.__version__}.
"""
    if not told:
        return text
    return f"{text}\n## The adapters\n\n{_body(of_adapter)}\n"


def _named(hub_id: str | None, otherwise: str) -> str:
    return otherwise if hub_id is None else _quoted(hub_id)


def _quoted(name: str) -> str:
    return f"`{name}`"


def _hub_model(recipe: Recipe) -> str | None:
    """Return the base's hub id; None for a local base or random weights."""
    return None if recipe.model.weights == "random" else _hub_id(recipe.model.name_or_path or "")


def _hub_id(name_or_path: str) -> str | None:
    name = hub_id_of(name_or_path)
    is_local = looks_like_a_path(name) or expand_user(name).exists() or name.endswith(".gguf")
    return None if is_local else name


def _hub_datasets(recipe: Recipe) -> list[str]:
    return [one.path for one in listed_sources(recipe.data) if is_hub_name(one.path)]


def _licence(recipe: Recipe) -> dict[str, Any]:
    """Return the base's licence if the model card in its folder names one: a derived model stays under its terms."""
    return _licence_in(_metadata(expand_user(recipe.model.name_or_path or "") / "README.md"))


def _licence_in(metadata: dict[str, Any]) -> dict[str, Any]:
    return {key: metadata[key] for key in ("license", "license_name", "license_link") if key in metadata}


def _metadata(card: Path) -> dict[str, Any]:
    """Return a model card's metadata for the hub; empty if there is no model card."""
    try:
        return metadata_load(card) or {} if card.is_file() else {}
    except (ValueError, yaml.YAMLError):
        return {}  # a user's own notes


def _body(card: Path) -> str:
    """Return a model card's text without its title, with headings one level down."""
    text = ModelCard.load(card).text.strip()
    _, _, text = text.partition("\n") if text.startswith("# ") else ("", "", text)
    return re.sub(r"^(#+) ", r"#\1 ", text.strip(), flags=re.MULTILINE)


def _chosen_settings(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Return the settings that a reader looks for or that differ from the defaults, in the recipe's YAML form."""
    asked_for = _ALWAYS | (_ALWAYS_OF_ADAPTERS if recipe.adapter.name != "none" else set())
    defaults, chosen = Recipe(), dict[str, dict[str, Any]]()
    for path, key in recipe_keys().items():
        value, (group, _, name) = key.value_in(recipe), path.partition(".")
        is_own = value != key.value_in(defaults) and path not in _OF_THIS_MACHINE
        if path in asked_for or is_own:
            chosen.setdefault(group, {})[name] = list(value) if isinstance(value, tuple) else value
    return chosen
