"""``lowmem-ft evaluate``: loss and perplexity of a model on any data, by the code that evaluates in training."""

from __future__ import annotations

from lowmem_ft.cli.console.asking import source_and_recipe
from lowmem_ft.cli.console.exit_codes import explains_user_errors
from lowmem_ft.cli.console.parser import Parser
from lowmem_ft.cli.console.written_files import file_problems
from lowmem_ft.foundation.errors import raise_problems
from lowmem_ft.foundation.system.interrupts import on_interrupt

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
        options, settings = _parser().parse_options(arguments)
        raise_problems(file_problems(options, "json"))
        source, recipe = source_and_recipe(options.model, settings, base=options.base)

        from lowmem_ft.cli.answers.evaluate import evaluate

        return evaluate(options, source, recipe)


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
