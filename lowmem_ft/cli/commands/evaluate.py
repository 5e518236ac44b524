"""``lowmem-ft evaluate``: loss and perplexity of a model on any data, by the code that evaluates in training."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from lowmem_ft.cli.console.asking import source_and_recipe
from lowmem_ft.cli.console.exit_codes import explains_user_errors
from lowmem_ft.cli.console.output import Output
from lowmem_ft.cli.console.parser import Parser
from lowmem_ft.cli.console.written_files import file_problems
from lowmem_ft.foundation.errors import raise_problems
from lowmem_ft.foundation.system.interrupts import on_interrupt

if TYPE_CHECKING:
    from lowmem_ft.recipe import Recipe

_EXAMPLES = """\
examples:
  lowmem-ft evaluate Qwen/Qwen2.5-7B data=chats.jsonl
  lowmem-ft evaluate runs/7b-qlora
  lowmem-ft evaluate runs/7b-qlora/model data=chats.jsonl model.quantization=nf4 --json -
  lowmem-ft evaluate Qwen/Qwen2.5-7B data=chats.jsonl data.packing=true data.max_length=2048

A run is evaluated on its own held-out data, by its own recipe; data=X names other data, all of which counts. Logits are
computed in parts (loss.chunk_tokens), so that memory stays bounded. Log lines and the estimate go to stderr.

Exit codes: 0 done; 3 memory ran out; 2 the input is at fault."""


@explains_user_errors
def main(arguments: list[str]) -> int:
    """Evaluate what the arguments name.

    Args:
        arguments: the model, ``key=value`` settings and options.

    Returns:
        The exit code, 0.
    """
    with on_interrupt("while evaluating: nothing was written."):
        return _evaluate(arguments)


def _evaluate(arguments: list[str]) -> int:
    options, settings = _parser().parse_options(arguments)
    raise_problems(file_problems(options, "json"))

    source, recipe = source_and_recipe(options.model, settings, base=options.base)

    from lowmem_ft.cli.console.logs import take_over_library_logs
    from lowmem_ft.planning.preflight.own_process import estimate_evaluation
    from lowmem_ft.reports.estimate_words import verdict
    from lowmem_ft.reports.text.document import Pairs
    from lowmem_ft.training.export.saved_evaluation import evaluate_saved

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
    from lowmem_ft.data.sources.listed import listed_sources

    return ",".join(one.path for one in listed_sources(recipe.data))


def _parser() -> Parser:
    parser = Parser(
        prog="lowmem-ft evaluate",
        usage="lowmem-ft evaluate MODEL|ADAPTER_DIR|RUN_DIR [data=X] [key=value ...]\n"
        "       [--base NAME] [--json FILE|-] [--overwrite]",
        description="Measure loss and perplexity of a model, an adapter or a run, in bounded memory.",
        epilog=_EXAMPLES,
    )
    parser.add_model()
    parser.add_once(
        {
            "--base NAME": "base model of an adapter, if it has moved",
            "--json FILE": "write the result as JSON; -: to stdout",
        }
    )
    parser.add_overwrite()
    return parser
