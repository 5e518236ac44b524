"""Finds why a stock model's own loss is not one number: no technique can be compared with it then."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

CUT = 20
"""Tokens of the shorter row."""

_LAST_PLACE = 2.0**-23
_NUM_CHANGES = 8


@torch.no_grad()
def why_losses_differ(model: Any, ids_BT: torch.Tensor, limit: float) -> list[str]:
    """Return why a model's own logits differ from themselves, if they do.

    Args:
        model: a stock model in float32, which is changed in place.
        ids_BT: more than :data:`CUT` tokens a row, shape (B, T).
        limit: largest difference, relative to the largest logit, that is rounding.

    Returns:
        Reasons to follow "stock transformers' model"; none if no try makes a difference.
    """
    model.train()
    before = torch.get_rng_state()
    logits_BTV = _logits(model, ids_BT)
    if not torch.equal(before, torch.get_rng_state()):
        return ["draws random numbers"]
    reasons = []
    if _difference(_logits(model, ids_BT[:, :CUT]), logits_BTV[:, :CUT]) > limit:
        reasons.append("computes other values for the same tokens in a longer row")
    if any(_difference(_logits(changed, ids_BT), logits_BTV) > limit for changed in _changed(model)):
        reasons.append("chooses by scores that the last bit of a weight changes")
    return reasons


def _changed(model: Any) -> Iterator[Any]:
    """Yield the model with some of its weights changed in the last place, a few times; then restore it."""
    weights = [parameter.data for parameter in model.parameters()]
    kept = [weight.clone() for weight in weights]
    for seed in range(_NUM_CHANGES):
        generator = torch.Generator().manual_seed(seed)
        for weight, stock in zip(weights, kept, strict=True):
            weight.copy_(stock * (1 + _LAST_PLACE * torch.randint(-1, 2, stock.shape, generator=generator)))
        yield model
    for weight, stock in zip(weights, kept, strict=True):
        weight.copy_(stock)


def _logits(model: Any, ids_BT: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids_BT, use_cache=False).logits


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())
