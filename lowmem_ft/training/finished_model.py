"""The end of a run: a model folder with its card, and its way to the hub."""

from __future__ import annotations

import logging
import shutil
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lowmem_ft.errors import CheckpointError
from lowmem_ft.models import save_model
from lowmem_ft.recipe import Recipe, recipe_to_yaml
from lowmem_ft.training.evaluation import EvaluationResult
from lowmem_ft.training.run_folder import RunFolder

logger = logging.getLogger(__name__)


def save_finished_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: RunFolder,
    recipe: Recipe,
    *,
    steps: int,
    tokens: int,
    loss: float | None,
    evaluation: EvaluationResult | None,
) -> None:
    """Write ``model/`` (weights, tokenizer, generation config, card), check it, and upload it if the recipe says so.

    Raises:
        CheckpointError: if it cannot be written; the checkpoints are untouched.
        UserError: if the upload fails; the folder stays.
    """
    target = folder.model_folder
    partial = target.with_suffix(".incomplete")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        save_model(model, tokenizer, partial)
        card = model_card(recipe, steps=steps, tokens=tokens, loss=loss, evaluation=evaluation)
        (partial / "README.md").write_text(card)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"The finished model cannot be written to {target}: {error}. The checkpoints in {folder.path} are "
            "untouched; make room and run again with training.resume_from_checkpoint=auto."
        ) from error
    logger.info("The model is in %s; from_pretrained loads it.", target)
    if recipe.training.push_to_hub:
        upload_model(target, recipe, default_name=folder.path.name)


def model_card(
    recipe: Recipe, *, steps: int, tokens: int, loss: float | None, evaluation: EvaluationResult | None
) -> str:
    """A hub model card: where the model comes from, what came out, and the recipe to do it again."""
    results = {"optimizer steps": f"{steps}", "tokens seen": f"{tokens:,}"}
    if loss is not None:
        results["training loss of the last step"] = f"{loss:.4f}"
    if evaluation is not None:
        results["held-out loss"] = f"{evaluation.loss:.4f}"
        results["held-out perplexity"] = f"{evaluation.perplexity:.2f}"
    rows = "\n".join(f"| {name} | {value} |" for name, value in results.items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [lowmem_ft]
{_base_model_line(recipe)}---

# {recipe.name}

Fine-tuned from `{recipe.model.name_or_path}` on `{recipe.data.path}` with lowmem_ft, torch {torch.__version__} and
transformers {transformers.__version__}.

| result | |
|---|---|
{rows}

## Recipe

```yaml
{recipe_to_yaml(recipe).strip()}
```
"""


def upload_model(target: Any, recipe: Recipe, *, default_name: str) -> None:
    """Upload the model folder to ``training.hub_model_id``.

    Raises:
        UserError: if the hub refuses or cannot be reached; says how to upload by hand.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    from lowmem_ft.errors import UserError

    name = recipe.training.hub_model_id or default_name
    api = HfApi()
    try:
        repository = api.create_repo(name, private=recipe.training.hub_private_repo, exist_ok=True)
        api.upload_folder(repo_id=repository.repo_id, folder_path=target)
    except (HfHubHTTPError, OSError) as error:
        raise UserError(
            f"The model is saved in {target}, but could not be uploaded to {name}: {error}. "
            f"Once `hf auth login` works, run: hf upload {name} {target}"
        ) from error
    logger.info("Uploaded to %s.", repository)


def _base_model_line(recipe: Recipe) -> str:
    """Hub ids only: a local path would say nothing to others and break the card's check."""
    name = recipe.model.name_or_path or ""
    return f"base_model: {name}\n" if name.count("/") == 1 and not name.startswith((".", "/", "~")) else ""
