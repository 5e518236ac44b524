"""Routing of tokens to the experts of a mixture, which a trace assumes: it decides the rows of each expert.

A router picks experts by ``topk`` of scores that a trace does not have. Loops over experts take from its indices how
many rows each expert computes. All experts of a layer together compute tokens x K rows, whatever the router picks, so
that the largest size of each expert alone would be several times too much.

Two of all routings are traced:

- *uneven*, which needs the most memory: one of the last experts computes a row of every token, so that the temporary
  tensors of one expert are at their largest while loops keep those of the others for backward. The experts after it
  compute one row each: backward begins with them, and holds their weights' gradients before it frees anything large.
  The others share the rest evenly, so that each keeps what is made for an expert, such as a cast weight;
- *balanced*, which training aims at: all experts compute as many rows.

Axes: T tokens, K experts of a token, E experts.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

Routing = Literal["uneven", "balanced"]

MOST_ROUTED_ELEMENTS = 2**25
"""Elements above which values that follow from a routing are not computed: a mask of T x K x E takes 8 bytes each."""

NUM_SMALL = 2
"""Experts after the one with a row of every token."""

_MARK = "follows_from_routing"


def picked(scores: Tensor, num_picked: int, dim: int, routing: Routing) -> Tensor:
    """Return the indices that a router's ``topk`` is assumed to pick, on the CPU.

    Args:
        scores: scores of all experts; only their shape is read.
        num_picked: K.
        dim: the axis of E experts.
        routing: how tokens are routed.

    Returns:
        Integers below E in the shape of the scores, with K in the place of E; a token's are all different.
    """
    num_experts = scores.shape[dim]
    others = list(scores.shape)
    del others[dim]
    with unset_fake_temporarily():
        token_T = torch.arange(torch.Size(others).numel())
        if routing == "balanced" or num_picked == num_experts:
            picked_TK = _in_turn(token_T, num_picked, num_experts)
        else:
            picked_TK = _uneven(token_T, num_picked, num_experts)
        picked_TK = picked_TK.reshape(*others, num_picked).movedim(-1, dim).contiguous()
    return marked(picked_TK)


def _in_turn(token_T: Tensor, num_picked: int, num_experts: int) -> Tensor:
    """Let tokens take the first experts, the next ones, and so on; shape (T, number picked)."""
    return (token_T[:, None] * num_picked + torch.arange(num_picked)) % num_experts


def _uneven(token_T: Tensor, num_picked: int, num_experts: int) -> Tensor:
    """Let all tokens take one expert, and one token each of the experts after it; shape (T, number picked)."""
    num_small = min(NUM_SMALL, num_experts - num_picked)
    large = num_experts - num_small - 1
    small = torch.arange(large + 1, num_experts)
    if num_picked == 1:
        picked_TK = torch.where(token_T < large, token_T, large)[:, None]
    else:
        large_T1 = torch.full((len(token_T), 1), large)
        picked_TK = torch.cat([large_T1, _in_turn(token_T, num_picked - 1, large)], dim=1)
    picked_TK[-num_small:, -1] = small[: len(token_T)]
    return picked_TK


def marked(values: Tensor) -> Tensor:
    """Mark values as following from a routing, and return them."""
    setattr(values, _MARK, True)
    return values


def follows_from_routing(values: Any) -> bool:
    """Return whether values follow from a routing."""
    return hasattr(values, _MARK)
