"""Text generation while tracing: a few of the tokens are decoded, and each stands for those around it.

Decoding repeats one forward over a cache that grows by a position a token. ``generate`` itself runs here; between two
tokens that are traced, what grows is enlarged at once by the tokens left out: the sequences, their masks and positions,
the cache and the lists of scores. Memory is then that of a run at each traced token, of which the last is the largest,
and the clock counts the tokens in between by rounds of the traced ones (``calls/skipped_rounds.py``). Costs of a token
are nearly linear in its position, so the middle of a stretch stands for all of it.

No sequence ends early: the values of new tokens are those of a token that ends nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from lowmem_ft.foundation.upstream.patches import replace, wrap
from lowmem_ft.virtual_gpu.calls.skipped_rounds import AlikeRounds
from lowmem_ft.virtual_gpu.values.constant_propagation import known_values, set_values

FEWEST_TOKENS = 8
"""Tokens up to which all are traced."""

NUM_STRETCHES = 2
"""Stretches of tokens that the token in the middle of each stands for."""

_GROWS, _SLIDES, _STATIC, _STATIC_SLIDING, _STAYS = range(5)

_KINDS = {
    "DynamicLayer": _GROWS,
    "LinearAttentionAndFullAttentionLayer": _GROWS,
    "DynamicSlidingWindowLayer": _SLIDES,
    "LinearAttentionAndSlidingWindowAttentionLayer": _SLIDES,
    "StaticLayer": _STATIC,
    "LinearAttentionAndStaticFullAttentionLayer": _STATIC,
    "StaticSlidingWindowLayer": _STATIC_SLIDING,
    "LinearAttentionAndStaticSlidingWindowAttentionLayer": _STATIC_SLIDING,
    "LinearAttentionLayer": _STAYS,
    "DummyLayer": _STAYS,
}
"""The way in which a layer of a cache takes up tokens, by the name of its class."""

_CACHES = ("past_key_values", "cache_params")


def schedule(num_tokens: int) -> dict[int, int]:
    """Return the tokens to trace, by their number from 0, and how many tokens each stands for.

    Args:
        num_tokens: new tokens of each sequence.
    """
    if num_tokens <= FEWEST_TOKENS:
        return dict.fromkeys(range(num_tokens), 1)
    # The first comes of the prompt's own forward, the second is the first to find what that has left.
    first, last = 2, num_tokens - 1
    ends = [first + (last - first) * part // NUM_STRETCHES for part in range(NUM_STRETCHES + 1)]
    middles = {(begin + end - 1) // 2: end - begin for begin, end in pairwise(ends)}
    return {0: 1, 1: 1, **middles, last: 1}


def plain_token(config: Any, generation_config: Any) -> int:
    """Return a token that neither ends a sequence nor stands for a picture or sound."""
    text = config.get_text_config(decoder=True)
    special: set[Any] = set()
    for owner in (config, text, generation_config):
        for name, value in vars(owner).items():
            if name.endswith(("token_id", "token_index")):
                special.update(value if isinstance(value, (list, tuple)) else (value,))
    return next(number for number in range(text.vocab_size // 2, text.vocab_size) if number not in special)


class CoarseDecoding:
    """Decodes a few tokens of each ``generate`` that samples or takes the most probable token.

    Args:
        rounds: those of the trace.
        on_generation: called with the tokens that each sequence gets, and why all of them are traced, which is empty
            where they are not.

    Attributes:
        most_grown_bytes: the most bytes of a cache that grew. A run allocates such a cache again for each token,
            and what an earlier one has left is too small for the next, so that much may be held in addition.
    """

    def __init__(self, rounds: AlikeRounds, on_generation: Callable[[int, str], None]) -> None:
        self.most_grown_bytes = 0
        self._all_rounds = rounds
        self._on_generation = on_generation

    def sample(
        self,
        sample: Callable[..., Any],
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run ``GenerationMixin._sample`` on a few tokens; the arguments are its own."""
        arguments = (model, input_ids, logits_processor, stopping_criteria, generation_config, *args)
        if stopping_criteria.max_length is None or generation_config.is_assistant:
            return sample(*arguments, **kwargs)
        num_tokens = stopping_criteria.max_length - input_ids.shape[1]
        obstacle = _obstacle(generation_config, kwargs)
        self._on_generation(num_tokens, obstacle)
        loop = _Loop(
            self._all_rounds,
            dict.fromkeys(range(num_tokens), 1) if obstacle else schedule(num_tokens),
            known_values(input_ids),
            plain_token(model.config, generation_config),
        )
        with contextlib.ExitStack() as undo:
            undo.callback(loop.close)
            for name, around in (
                ("_has_unfinished_sequences", loop.next_token),
                ("_update_model_kwargs_for_generation", loop.take_up),
            ):
                replace(undo, model, name, functools.partial(around, getattr(model, name)))
            wrap(undo, type(stopping_criteria), "__call__", loop.lengthen)
            result = sample(*arguments, **kwargs)
        self.most_grown_bytes = max(self.most_grown_bytes, loop.grown_bytes)
        return loop.completed(result)


class _Loop:
    """The decoding loop of one call: the token that it is at, and what the tokens left out would have kept.

    Args:
        rounds: those of the trace.
        tokens: the tokens to trace, as :func:`schedule` returns them.
        prompts: the values of the prompts, shape [sequences, tokens]; None: unknown, and new tokens are so, too.
        token: the value of each new token.
    """

    def __init__(
        self, rounds: AlikeRounds, tokens: dict[int, int], prompts: Tensor | None, token: int
    ) -> None:
        self._traced = list(tokens)
        self._rounds = rounds.standing_for(tokens.values())
        self._prompts = prompts
        self._token = token
        self._index = -1
        self._left_out: dict[int, list[Tensor]] = {}
        self.grown_bytes = 0

    def close(self) -> None:
        self._rounds.close()

    @property
    def _num_skipped(self) -> int:
        """Tokens left out between the present one and the next."""
        here_and_next = self._traced[self._index : self._index + 2]
        return here_and_next[-1] - here_and_next[0] - 1 if len(here_and_next) == 2 else 0

    def next_token(self, has_unfinished: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
        if not has_unfinished(*args, **kwargs):
            return False
        self._index += 1
        next(self._rounds, None)
        return True

    def take_up(self, update: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Add the present token and those left out after it to masks and positions, and the latter to the cache."""
        skipped = self._num_skipped
        if not skipped:
            return update(*args, **kwargs)
        model_kwargs = update(*args, **kwargs, num_new_tokens=1 + skipped)
        self.grown_bytes = sum(_take_up(layer, skipped) for layer in _layers_of(model_kwargs))
        return model_kwargs

    def lengthen(
        self, stops: Callable[..., Any], criteria: Any, input_ids: Tensor, scores: Any, **kwargs: Any
    ) -> Any:
        """Lengthen the sequences, in place, before the loop asks whether they end, and give new tokens their value."""
        if skipped := self._num_skipped:
            longer = input_ids.new_empty((input_ids.shape[0], input_ids.shape[1] + skipped))
            input_ids.set_(longer)  # type: ignore[call-overload]
            if scores:
                self._left_out[self._index] = [torch.empty_like(scores[-1]) for _ in range(skipped)]
        if self._prompts is not None:
            num_new = input_ids.shape[1] - self._prompts.shape[1]
            with _disable_current_modes():
                set_values(input_ids, functional.pad(self._prompts, (0, num_new), value=self._token))
        return stops(criteria, input_ids, scores, **kwargs)

    def completed(self, result: Any) -> Any:
        """Return the result with the scores of the tokens left out."""
        if self._left_out:
            result.scores = tuple(
                one
                for index, score in enumerate(result.scores)
                for one in (score, *self._left_out.get(index, ()))
            )
        return result


def _obstacle(generation_config: Any, kwargs: Mapping[str, Any]) -> str:
    """Return what keeps tensors of each token in a way that is not known here; empty if nothing does."""
    if generation_config.return_dict_in_generate:
        for name in ("output_attentions", "output_hidden_states", "output_logits"):
            if getattr(generation_config, name):
                return name
    return next((name for name in map(_name_of, _layers_of(kwargs)) if name not in _KINDS), "")


def _layers_of(kwargs: Mapping[str, Any]) -> Iterable[Any]:
    """Return the layers of the cache that a model was given; the cache itself, if it has none."""
    cache = next((kwargs[name] for name in _CACHES if kwargs.get(name) is not None), None)
    if cache is None:
        return ()
    cache = getattr(cache, "self_attention_cache", cache)
    return getattr(cache, "layers", (cache,))


def _name_of(layer: Any) -> str:
    return type(layer).__name__


def _take_up(layer: Any, num_tokens: int) -> int:
    """Add tokens to a layer of a cache, as if each had come by itself; return the bytes of what grows."""
    kind = _KINDS[_name_of(layer)]
    if kind == _STAYS or not layer.is_initialized:
        return 0
    if kind == _STATIC:
        layer.cumulative_length.add_(num_tokens)
    elif kind == _STATIC_SLIDING:
        before = layer.cumulative_length_int
        layer.cumulative_length_int += num_tokens
        layer.cumulative_length.add_(max(0, min(layer.cumulative_length_int, layer.max_cache_len) - before))
    if kind in (_STATIC, _STATIC_SLIDING):
        return 0
    length, first = layer.keys.shape[-2] + num_tokens, 0
    if kind == _SLIDES:
        layer.cumulative_length += num_tokens
        length = min(layer.cumulative_length, layer.sliding_window)
        first = max(0, length - layer.sliding_window + 1)
    for name in ("keys", "values"):
        shape = getattr(layer, name).shape
        longer = getattr(layer, name).new_empty((*shape[:-2], length, shape[-1]))
        setattr(layer, name, longer[..., first:, :] if first else longer)
        del longer  # the values' turn comes with the keys' old memory free
    return layer.keys.untyped_storage().nbytes() + layer.values.untyped_storage().nbytes()
