"""The end of a run: a model folder with its card, and its way to the hub."""

from __future__ import annotations

import logging

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from lowmem_ft.models import hub_id_of
from lowmem_ft.recipe import Recipe, recipe_to_yaml
from lowmem_ft.training.checkpoint import explaining_write_errors
from lowmem_ft.training.durable import whole_folder
from lowmem_ft.training.evaluation import EvaluationResult
from lowmem_ft.training.hub_upload import upload_model
from lowmem_ft.training.run_folder import RunFolder
from lowmem_ft.training.session import Session

logger = logging.getLogger(__name__)


def save_finished_model(
    session: Session,
    tokenizer: PreTrainedTokenizerBase,
    folder: RunFolder,
    recipe: Recipe,
    *,
    steps: int,
    tokens: int,
    loss: float | None,
    evaluation: EvaluationResult | None,
    upload: bool,
) -> None:
    """Write ``model/`` (weights, tokenizer, generation config, card), check it, and upload it if asked to.

    Raises:
        CheckpointError: if it cannot be written; the checkpoints are untouched.
        UserError: if the upload fails; the folder stays.
    """
    target = folder.model_folder
    card = model_card(recipe, steps=steps, tokens=tokens, loss=loss, evaluation=evaluation)
    with explaining_write_errors(target), whole_folder(target) as partial:
        session.save(tokenizer, partial)
        (partial / "README.md").write_text(card, "utf-8")
    if session.adapter is None:
        logger.info("The model is in %s; from_pretrained loads it.", target)
    else:
        logger.info(
            "The adapter is in %s; peft.AutoPeftModelForCausalLM loads it with its base, `lowmem-ft merge %s OUT_DIR` "
            "adds it to the base.",
            target,
            target,
        )
    if upload:
        upload_model(target, recipe.training, default_name=folder.path.name)


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
    is_adapter = recipe.adapter.name != "none"
    library, what = ("peft", "LoRA adapters fine-tuned") if is_adapter else ("transformers", "Fine-tuned")
    return f"""---
library_name: {library}
pipeline_tag: text-generation
tags: [lowmem_ft]
{_base_model_line(recipe)}---

# {recipe.name}

{what} from `{recipe.model.name_or_path}` on `{recipe.data.path}` with lowmem_ft, torch {torch.__version__} and
transformers {transformers.__version__}.

| result | |
|---|---|
{rows}

## Recipe

```yaml
{recipe_to_yaml(recipe).strip()}
```
"""


def _base_model_line(recipe: Recipe) -> str:
    """Hub ids only: a local path would say nothing to others and break the card's check."""
    name = hub_id_of(recipe.model.name_or_path or "")
    return f"base_model: {name}\n" if name.count("/") == 1 and not name.startswith((".", "/", "~")) else ""
