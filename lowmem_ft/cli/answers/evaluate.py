"""Loss and perplexity of a model, with the estimate of the memory that this takes."""

from __future__ import annotations

import argparse
import time

from lowmem_ft.cli.console.asking import take_over_library_logs
from lowmem_ft.cli.console.output import Output
from lowmem_ft.data.sources.listed import listed_sources
from lowmem_ft.planning.preflight.own_process import estimate_evaluation
from lowmem_ft.recipe import Recipe
from lowmem_ft.reports.estimate_words import verdict
from lowmem_ft.reports.text.document import Pairs
from lowmem_ft.training.export.model_source import ModelSource
from lowmem_ft.training.export.saved_evaluation import evaluate_saved


def evaluate(options: argparse.Namespace, source: ModelSource, recipe: Recipe) -> int:
    """Evaluate a model, and report it.

    Args:
        options: the command's.
        source: the model.
        recipe: that of its forward passes, with the data.

    Returns:
        The exit code, 0.
    """
    take_over_library_logs()
    estimate = None
    if recipe.budget.preflight:
        estimate = estimate_evaluation(recipe, adapter=source.adapter)
        length = recipe.data.max_length or "as many as the model takes"
        Output("-").add(f"{source} {verdict(estimate)} (estimated, for rows of {length} tokens).")
    start = time.perf_counter()
    result = evaluate_saved(recipe, adapter=source.adapter)
    seconds = time.perf_counter() - start
    output = Output(options.json)
    output.add(
        Pairs(
            [
                ("model", str(source)),
                ("data", f"{_named(recipe)}{', held-out rows' if recipe.data.has_held_out else ''}"),
                ("loss", f"{result.loss:.4f} nats per token"),
                *((f"loss of {name}", f"{loss:.4f}") for name, loss in result.by_source.items()),
                ("perplexity", f"{result.perplexity:.2f}"),
                ("label tokens", f"{result.num_label_tokens:,}"),
                ("seconds", f"{seconds:.1f}"),
            ],
            indent=0,
        )
    )
    output.write_json(
        {
            "schema": 1,
            "model": source.model.name_or_path,
            "adapter": None if source.adapter is None else str(source.adapter),
            "data": _named(recipe),
            "is_held_out": recipe.data.has_held_out,
            "loss": result.loss,
            "loss_by_source": dict(result.by_source),
            "perplexity": result.perplexity,
            "label_tokens": result.num_label_tokens,
            "seconds": seconds,
            "estimated_peak_bytes": None if estimate is None else estimate.process_peak_bytes,
        }
    )
    return 0


def _named(recipe: Recipe) -> str:
    """Return the paths of a recipe's data, with commas between them."""
    return ",".join(one.path for one in listed_sources(recipe.data))
