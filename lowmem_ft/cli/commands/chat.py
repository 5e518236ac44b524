"""``lowmem-ft chat``: a conversation with a model, an adapter or a run, in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import math
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from lowmem_ft.cli.console.asking import source_and_recipe
from lowmem_ft.cli.console.exit_codes import explains_user_errors, for_stderr
from lowmem_ft.cli.console.parser import Parser
from lowmem_ft.foundation.errors import DoesNotFitError, UserError, raise_problems
from lowmem_ft.foundation.system.interrupts import on_interrupt
from lowmem_ft.foundation.system.signals import SIGNALLED, was_terminated

if TYPE_CHECKING:
    from lowmem_ft.recipe import Recipe
    from lowmem_ft.training.export.model_source import ModelSource
    from lowmem_ft.training.step.conversation import Conversation

_EXAMPLES = """\
examples:
  lowmem-ft chat runs/7b-qlora
  lowmem-ft chat Qwen/Qwen2.5-7B-Instruct model.quantization=nf4 --system "Answer in one sentence."
  lowmem-ft chat runs/7b-qlora/model --once "What is the capital of Norway?" --no-sample

Each line is a turn; /clear forgets all turns, /exit or the end of input leaves. Ctrl-C stops an answer; a second one,
or one at the prompt, leaves. Settings count where forward passes do: model.*, offload.*, training.mixed_precision,
training.use_cpu. What is not set about sampling is the model's own (generation_config.json)."""

DEFAULT_CONTEXT = 4096
"""Tokens for which the cache is stated, if the model takes more."""

_WHILE_IT_ANSWERED = "while it answered."

DEFAULT_NEW_TOKENS = 512


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

    from lowmem_ft.cli.console.logs import take_over_library_logs

    conversation = _conversation(options, source, recipe)
    take_over_library_logs()
    if options.once is not None:
        with on_interrupt(_WHILE_IT_ANSWERED):
            _answer(conversation, options.once)
        return 0
    return _talk(conversation)


def _conversation(options: argparse.Namespace, source: ModelSource, recipe: Recipe) -> Conversation:
    from lowmem_ft.data.text.chat_templates import prepare_tokenizer
    from lowmem_ft.foundation.units import format_bytes
    from lowmem_ft.models.hf_config import load_model_config, max_positions
    from lowmem_ft.models.tokenizer import load_tokenizer
    from lowmem_ft.planning.estimator.answer_size import size_of_answers
    from lowmem_ft.training.export.forward_session import build_forward_session, runtime_of, saved_adapter
    from lowmem_ft.training.runtimes.build import plan_session
    from lowmem_ft.training.step.conversation import Conversation

    runtime = runtime_of(recipe)
    limit = max_positions(load_model_config(recipe.model))
    context = options.context or min(limit or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    if limit is not None and context > limit:
        raise UserError(
            f"--context is at most what the model takes, {limit} tokens, got {context}. Lower it."
        )
    size = size_of_answers(recipe.model, context)
    cache = "a cache that shapes do not tell" if size.cache_bytes is None else format_bytes(size.cache_bytes)
    _say(
        f"{source} takes {format_bytes(size.weight_bytes)} of weights on {runtime.machine.device}, and {cache} of keys "
        f"and values for {context:,} tokens."
    )
    tokenizer = load_tokenizer(recipe.model)
    prepare_tokenizer(tokenizer, chat_template=recipe.data.chat_template)
    plan = plan_session(recipe, runtime)
    session = build_forward_session(recipe, runtime, plan, add_adapter=saved_adapter(source.adapter))
    return Conversation(session, tokenizer, system=options.system, generation=_generation(options))


def _generation(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options about sampling that were given, by transformers' names."""
    names = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    chosen: dict[str, Any] = {"max_new_tokens": DEFAULT_NEW_TOKENS, **given}
    if options.sample is not None:
        chosen["do_sample"] = options.sample
    elif {"temperature", "top_p", "top_k", "min_p"} & chosen.keys():
        chosen["do_sample"] = True
    if chosen.get("do_sample") is False:
        # Else generate warns of what the model's own settings say of sampling.
        chosen |= {"temperature": 1.0, "top_p": 1.0, "top_k": 50}
    return chosen


def _talk(conversation: Conversation) -> int:
    """Answer one line after the other: Ctrl-C ends an answer, a second one, or one at the prompt, the conversation."""
    from lowmem_ft.training.step.conversation import StoppedTwice

    _say("Type a message; /clear starts over, /exit leaves.")
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            _say("")
            return 0
        except KeyboardInterrupt:
            _say("")
            return SIGNALLED + signal.SIGINT
        except UnicodeDecodeError as error:
            raise UserError(
                f"The input is UTF-8 text, got {error.object[error.start : error.end]!r}. Save it as UTF-8."
            ) from error
        if line == "/exit":
            return 0
        if line == "/clear":
            conversation.clear()
            _say("Started over.")
        elif line.startswith("/"):
            _say(f"There is no {line.split()[0]}; there are /clear and /exit.")
        elif line:
            try:
                _answer(conversation, line)
            except UserError as error:
                _say(str(error))
            except KeyboardInterrupt as stop:
                if was_terminated() or isinstance(stop, StoppedTwice):
                    raise
                _say("\n(stopped)")


def _answer(conversation: Conversation, text: str) -> None:
    """Print an answer as it comes.

    Raises:
        DoesNotFitError: if memory runs out.
        KeyboardInterrupt: after a Ctrl-C, once nothing computes any more; what has been answered stays.
    """
    from lowmem_ft.training.out_of_memory.error import is_out_of_memory

    try:
        # Closing waits for the token that is being computed.
        with contextlib.closing(conversation.ask(text)) as pieces:
            for piece in pieces:
                print(piece, end="", flush=True)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise DoesNotFitError(
            "Memory ran out while the model answered. Set model.quantization=nf4 or a lower --max-new-tokens, or take "
            "a smaller model."
        ) from error
    print()


def _say(text: str) -> None:
    print(for_stderr(text), file=sys.stderr, flush=True)


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
