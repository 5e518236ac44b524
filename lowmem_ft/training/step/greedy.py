"""Greedy answers of a session's model, which leave everything that training depends on as it was.

transformers' ``generate`` runs the model's own forward inside the techniques of the session: streamed weights, packed
bases, tiles and adapters work as they do in an evaluation. Nothing is drawn at random, and no gradient exists.

Axes: B rows, of which there is one, T tokens.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

from lowmem_ft.foundation.errors import DataError
from lowmem_ft.techniques.attention.ring_attention import RING_ATTENTION
from lowmem_ft.techniques.attention.varlen_attention import VARLEN_ATTENTION
from lowmem_ft.techniques.distributed.fully_sharded import FullySharded
from lowmem_ft.techniques.loss.router_loss import router_loss_off
from lowmem_ft.training.step.session import ForwardSession


def greedy_answer(
    session: ForwardSession, input_ids: Sequence[int], max_new_tokens: int, end_ids: Sequence[int]
) -> list[int]:
    """Return the tokens of an answer; see :func:`generate_greedily`."""
    prompt_BT = torch.tensor([list(input_ids)], device=session.runtime.machine.device)
    return generate_greedily(session, prompt_BT, max_new_tokens, end_ids)[0, len(input_ids) :].tolist()


def generate_greedily(
    session: ForwardSession,
    prompt_BT: Tensor,
    max_new_tokens: int,
    end_ids: Sequence[int],
    *,
    after_forward: Callable[[], object] = lambda: None,
) -> Tensor:
    """Append the most likely next token to a prompt, again and again, until the model ends its answer.

    The model is in eval mode, and its deferred updates are made (``techniques.flush()``). Sharded weights are gathered
    layer by layer in all processes, each of which must call this with the same prompt.

    Args:
        session: the model with its techniques.
        prompt_BT: the prompt, one row, on the device.
        max_new_tokens: the most tokens of the answer.
        end_ids: the tokens that end it, see :func:`end_tokens`.
        after_forward: called after each forward pass: first the prompt's, then one per token.

    Returns:
        The tokens of the prompt and of the answer, the one that ends it included.
    """
    model = session.unwrapped_model

    def note_forward(_: Tensor, scores: Tensor) -> Tensor:
        after_forward()
        return scores

    with generating(session):
        generator: Any = model
        return generator.generate(
            input_ids=prompt_BT,
            attention_mask=torch.ones_like(prompt_BT),
            generation_config=_greedy(max_new_tokens, end_ids),
            logits_processor=LogitsProcessorList([note_forward]),
            synced_gpus=session.techniques.find(FullySharded) is not None,
        )


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens at which a model's answer ends: those of its generation config, and the tokenizer's EOS.

    Raises:
        DataError: if neither of the two has one, or one is no token of the tokenizer.
    """
    ends: Any = model.generation_config.eos_token_id if model.generation_config is not None else None
    of_tokenizer: Any = tokenizer.eos_token_id
    found = {end for end in (*(ends if isinstance(ends, list) else [ends]), of_tokenizer) if end is not None}
    names: Any = {end: isinstance(end, int) and tokenizer.convert_ids_to_tokens(end) for end in found}
    if unknown := [end for end, name in names.items() if not name]:
        raise DataError(
            f"eos_token_id in generation_config.json names tokens of the tokenizer by number, got {unknown[0]!r}. "
            "Correct it, or copy the file from the model again."
        )
    if not found:
        raise DataError(
            "An answer ends with an EOS token, and neither the model's generation_config.json nor its tokenizer has "
            "one. Set eos_token in tokenizer_config.json."
        )
    return sorted(found)


def _greedy(max_new_tokens: int, end_ids: Sequence[int]) -> GenerationConfig:
    """Return the settings of greedy search; those that it does not use are set to what they are without sampling.

    ``generate`` takes what is left out here from the model's own generation config, penalties for instance.
    """
    return GenerationConfig(
        do_sample=False,
        num_beams=1,
        temperature=1.0,
        top_k=50,
        top_p=1.0,
        max_new_tokens=max_new_tokens,
        use_cache=True,
        eos_token_id=list(end_ids),
        pad_token_id=end_ids[0],
    )


@contextlib.contextmanager
def generating(session: ForwardSession) -> Iterator[None]:
    """Let ``generate`` call a session's model in a block, inside its techniques and without gradients."""
    model = session.unwrapped_model
    with (
        torch.no_grad(),
        session.runtime.machine.autocast(),
        router_loss_off(model),
        _attention_that_takes_a_cache(model),
        _inputs_on_device(model, session.runtime.machine.device),
        _without_warning_of_weights_elsewhere(),
    ):
        yield


@contextlib.contextmanager
def _inputs_on_device(model: PreTrainedModel, device: torch.device) -> Iterator[None]:
    """Let a model find its inputs on the device in a block.

    transformers 5.23 moves them to where the model's first weight is: to the host, if it is streamed.
    """

    def moved(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return send_to_device(args, device), send_to_device(kwargs, device)

    hook = model.register_forward_pre_hook(moved, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


@contextlib.contextmanager
def _attention_that_takes_a_cache(model: PreTrainedModel) -> Iterator[None]:
    """Let attention be sdpa in a block where it is one for rows, which takes no cache of keys."""
    chosen = model.config._attn_implementation
    if chosen not in (VARLEN_ATTENTION, RING_ATTENTION):
        yield
        return
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(chosen)


@contextlib.contextmanager
def _without_warning_of_weights_elsewhere() -> Iterator[None]:
    """Suppress the warning that a model's first weight, here a streamed one, is on another device than the prompt."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You are calling .generate")
        yield
