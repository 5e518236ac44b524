"""The evaluation of a saved model on a recipe's data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lowmem_ft.data.batches.epoch_rows import Examples
from lowmem_ft.data.batches.stream import eval_batches
from lowmem_ft.data.sources.listed import listed_sources
from lowmem_ft.models.tokenizer import load_tokenizer
from lowmem_ft.recipe import Recipe
from lowmem_ft.training.evaluation.held_out_loss import (
    EvaluationInPieces,
    EvaluationResult,
    evaluate,
    together,
)
from lowmem_ft.training.export.forward_session import build_forward_session, runtime_of, saved_adapter
from lowmem_ft.training.out_of_memory.diagnosis import does_not_fit_here
from lowmem_ft.training.out_of_memory.error import is_out_of_memory
from lowmem_ft.training.runtimes.build import plan_session
from lowmem_ft.training.runtimes.reading_data import read_data
from lowmem_ft.training.step.budget_cap import apply_budget, lift_cap


def evaluate_saved(recipe: Recipe, *, adapter: Path | None = None) -> EvaluationResult:
    """Evaluate a model on the held-out part of a recipe's data, or on all of it if there is no held-out part.

    Args:
        recipe: from :func:`lowmem_ft.training.export.model_source.forward_recipe`.
        adapter: the folder of the model's adapter; None: it has none.

    Returns:
        The mean loss over all label tokens, and that of each source if there are several.

    Raises:
        UserError: if model or data cannot be used.
        DoesNotFitError: if memory runs out.
    """
    runtime = runtime_of(recipe)
    apply_budget(
        recipe.budget,
        runtime.machine.device,
        host=runtime.machine.host,
        uses_bitsandbytes=recipe.uses_bitsandbytes,
    )
    try:
        plan = plan_session(recipe, runtime)
        tokenizer = load_tokenizer(recipe.model)
        data = read_data(recipe, runtime.ranks, tokenizer, plan)
        session = build_forward_session(recipe, runtime, plan, add_adapter=saved_adapter(adapter))
        in_pieces = EvaluationInPieces(may_cut=recipe.budget.retry)

        def loss_on(examples: Examples) -> EvaluationResult:
            training = recipe.training
            batches = eval_batches(
                examples,
                batch_size=training.per_device_eval_batch_size or training.per_device_train_batch_size,
                plan=runtime.ranks.plan,
                collate=data.collate,
            )
            result = evaluate(session, runtime.ranks, batches, in_pieces=in_pieces)
            assert result is not None, "nothing interrupts it"
            return result

        by_source = data.evaluation_by_source
        if data.evaluation is None and len(listed := listed_sources(recipe.data)) > 1:
            # An epoch mixes its sources; each is evaluated whole, from the same cache of tokens.
            by_source = {
                one.name: read_data(replace(recipe, data=one.config), runtime.ranks, tokenizer, plan).train
                for one in listed
            }
        if by_source:
            return together({name: loss_on(examples) for name, examples in by_source.items()})
        return loss_on(data.train if data.evaluation is None else data.evaluation)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise does_not_fit_here(recipe, "in the evaluation", runtime) from error
    finally:
        lift_cap(recipe.budget)
