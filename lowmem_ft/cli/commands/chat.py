"""``lowmem-ft chat``: a conversation with a model, an adapter or a run, in the terminal."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator

from lowmem_ft.cli.console.asking import source_and_recipe
from lowmem_ft.cli.console.exit_codes import explains_user_errors
from lowmem_ft.cli.console.parser import Parser
from lowmem_ft.foundation.errors import raise_problems

_EXAMPLES = """\
examples:
  lowmem-ft chat runs/7b-qlora
  lowmem-ft chat Qwen/Qwen2.5-7B-Instruct model.quantization=nf4 --system "Answer in one sentence."
  lowmem-ft chat runs/7b-qlora/model --once "What is the capital of Norway?" --no-sample

Each line is a turn; /clear forgets all turns, /exit or the end of input leaves. Ctrl-C stops an answer; a second one,
or one at the prompt, leaves. Settings count where forward passes do: model.*, offload.*, training.mixed_precision,
training.use_cpu. What is not set about sampling is the model's own (generation_config.json)."""


@explains_user_errors
def main(arguments: list[str]) -> int:
    """Talk to what the arguments name.

    Args:
        arguments: the model, ``key=value`` settings and options.

    Returns:
        The exit code, 0.
    """
    options, settings = _parser().parse_options(arguments)
    raise_problems([*_problems(options), *_unused(settings)])

    source, recipe = source_and_recipe(options.model, settings, base=options.base, reads_data=False)

    from lowmem_ft.cli.answers.chat import chat

    return chat(options, source, recipe)


def _problems(options: argparse.Namespace) -> list[str]:
    found = []
    for name in ("max_new_tokens", "context"):
        value = getattr(options, name)
        if value is not None and value < 1:
            found.append(f"--{name.replace('_', '-')} is at least 1, got {value}. Raise it.")
    for name, (words, is_right) in _RANGES.items():
        if (value := getattr(options, name)) is not None and not is_right(value):
            found.append(
                f"--{name.replace('_', '-')} is {words}, got {value:g}. Leave it out, or correct it."
            )
    if options.temperature is not None and not 0 < options.temperature < math.inf:
        found.append(
            f"--temperature is above 0, got {options.temperature:g}. Use --no-sample for the most likely tokens."
        )
    if options.once is not None and not options.once.strip():
        found.append("--once takes a message with text, got an empty one. Leave it out to talk in turns.")
    return found


_RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "top_p": ("above 0 and at most 1", lambda value: 0 < value <= 1),
    "min_p": ("from 0 to 1", lambda value: 0 <= value <= 1),
    "top_k": ("at least 0, which is no limit", lambda value: value >= 0),
    "repetition_penalty": ("a finite number above 0", lambda value: 0 < value < math.inf),
}


def _unused(settings: Iterable[str]) -> Iterator[str]:
    """Yield what is wrong with keys of data: a conversation reads none."""
    keys = [setting.partition("=")[0] for setting in settings]
    for key in keys:
        if key == "data" or (key.startswith("data.") and key != "data.chat_template"):
            yield f"A conversation reads no data, got {key}. Leave it out; --system TEXT sets a system message."


def _parser() -> Parser:
    parser = Parser(
        prog="lowmem-ft chat",
        usage="lowmem-ft chat MODEL|ADAPTER_DIR|RUN_DIR [key=value ...] [--system TEXT]\n"
        "       [--once TEXT] [--max-new-tokens N] [--temperature X] [--top-p X]\n"
        "       [--top-k N] [--min-p X] [--repetition-penalty X] [--no-sample] ...",
        description="Talk to a model, an adapter or a run, by its chat template.",
        epilog=_EXAMPLES,
    )
    parser.add_model()
    parser.add_once(
        {
            "--system TEXT": "system message",
            "--once TEXT": "one turn: the answer alone goes to stdout",
            "--base NAME": "base model of an adapter, if it has moved",
        }
    )
    parser.add_once(
        {
            "--max-new-tokens N": "most tokens of an answer (default: 512)",
            "--context N": "tokens for which the cache is stated (default: 4096, or what the model takes)",
            "--top-k N": "sample among the N most likely tokens",
        },
        type=int,
    )
    parser.add_once(
        {
            "--temperature X": "divides the logits before sampling",
            "--top-p X": "sample among the most likely tokens whose probabilities add up to X",
            "--min-p X": "sample among tokens at least X times as likely as the most likely one",
            "--repetition-penalty X": "above 1: makes tokens that occurred less likely",
        },
        type=float,
    )
    parser.add_argument(
        "--sample",
        action=argparse.BooleanOptionalAction,
        help="draw tokens at random, or take the most likely; default: the model's own",
    )
    return parser
