"""A conversation with a model, in the terminal, for ``lowmem-ft chat``."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from typing import Any

from lowmem_ft.cli.console.asking import take_over_library_logs
from lowmem_ft.cli.console.exit_codes import for_stderr
from lowmem_ft.data.text.chat_templates import prepare_tokenizer
from lowmem_ft.foundation.errors import DoesNotFitError, UserError
from lowmem_ft.foundation.system.interrupts import on_interrupt
from lowmem_ft.foundation.system.signals import SIGNALLED, was_terminated
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.models.hf_config import load_model_config, max_positions
from lowmem_ft.models.tokenizer import load_tokenizer
from lowmem_ft.planning.estimator.answer_size import size_of_answers
from lowmem_ft.recipe import Recipe
from lowmem_ft.training.export.forward_session import build_forward_session, runtime_of, saved_adapter
from lowmem_ft.training.export.model_source import ModelSource
from lowmem_ft.training.out_of_memory.error import is_out_of_memory
from lowmem_ft.training.runtimes.build import plan_session
from lowmem_ft.training.step.conversation import Conversation, StoppedTwice

DEFAULT_CONTEXT = 4096
"""Tokens for which the cache is stated, if the model takes more."""

DEFAULT_NEW_TOKENS = 512


def chat(options: argparse.Namespace, source: ModelSource, recipe: Recipe) -> int:
    """Talk to a model, or answer ``--once``.

    Args:
        options: the command's.
        source: the model.
        recipe: that of its forward passes.

    Returns:
        The exit code.

    Raises:
        UserError: if the model does not take as many tokens as asked for, or the input is no text.
        DoesNotFitError: if memory runs out.
    """
    conversation = _conversation(options, source, recipe)
    take_over_library_logs()
    if options.once is not None:
        with on_interrupt("while it answered."):
            _answer(conversation, options.once)
        return 0
    return _talk(conversation)


def _conversation(options: argparse.Namespace, source: ModelSource, recipe: Recipe) -> Conversation:
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
