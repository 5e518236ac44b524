"""MLPs that process the tokens in tiles, so that their wide inner activations exist for one tile at a time.

Axes: B rows, T tokens of a row, H hidden size.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch import Tensor, nn

from lowmem_ft.foundation.devices import has_values
from lowmem_ft.foundation.errors import ModelError, raise_problems
from lowmem_ft.techniques.modules.model_parts import MLP_NAMES, ModelParts, mlps_of
from lowmem_ft.techniques.modules.patching import evaluating, set_attribute
from lowmem_ft.techniques.technique import Technique
from lowmem_ft.techniques.tiling.config import TilingConfig
from lowmem_ft.techniques.tiling.token_tiles import ForwardInTiles

__all__ = ["enable_tiled_mlp"]

log = logging.getLogger(__name__)

_CHECKED_ROWS, _CHECKED_TOKENS, _CHECKED_TILES = 2, 8, 3
"""Sizes of a comparison with the stock MLP in tiles of 6, 6 and 4 tokens, none of which is a row."""


def enable_tiled_mlp(model: nn.Module | ModelParts, config: TilingConfig) -> Technique:
    """Make the MLP of each decoder layer process the tokens in ``config.mlp`` tiles, one after the other.

    In backward each tile is computed again and differentiated, and every parameter gets its whole gradient at once, so
    that hooks on it fire once.

    Frees: the MLP's inner activations and their gradients except for one tile, of which a gated MLP holds 7 * tokens *
    intermediate numbers while its layer is differentiated. The gain is full for frozen weights; for trained linear
    layers the factors of their gradients stay, 3 * tokens * intermediate numbers, or a sum in fp32 if that is less (see
    ``weight_gradient.WeightGradient``). Other trained weights are summed in fp32.
    Costs: one more forward of the MLP in backward, none in a checkpointed layer that ends with the MLP (all except
    Gemma's kind): its recomputation stops before the MLP. Smaller matrix products.
    Equals: the same gradients up to the order of sums: those of linear layers are one product over all tokens if that
    takes less memory than a sum.
    Limits: dropout in the MLP draws other numbers than without tiles. No second derivative. An MLP that does not treat
    each token by itself is rejected: its output is compared on random tokens, except meta or fake weights, which are
    accepted. LLM.int8 passes that comparison, although it looks for outliers over all tokens. Routers' logits cannot be
    collected.
    Source: Arctic Long Sequence Training, 2025 (arXiv:2506.13996), whose backward fires hooks once per tile.

    Args:
        model: a causal LM from transformers, wrapped or not, with its adapters; or its parts.
        config: the number of tiles.

    Returns:
        A handle whose ``remove()`` restores the stock MLPs.

    Raises:
        UserError: if the number of tiles is less than 1.
        ModelError: if a layer's MLP cannot be found, or does not treat each token by itself.
    """
    raise_problems(config.problems())
    if config.mlp == 1:
        return Technique()
    parts = ModelParts.of(model)
    mlps = [mlp for layer in parts.text_layers() for mlp in _mlps_of_layer(layer)]
    _refuse_routers_whose_logits_are_collected(parts.model)
    for mlp in {type(mlp): mlp for mlp in mlps}.values():
        _check_token_wise(mlp, _random_hidden(parts.model, mlp))
    log.info("Tiled MLP: %d modules work on 1/%d of the tokens at a time.", len(mlps), config.mlp)
    return Technique(*(set_attribute(mlp, "forward", ForwardInTiles(mlp, config.mlp)) for mlp in mlps))


def _mlps_of_layer(layer: nn.Module) -> list[nn.Module]:
    if mlps := mlps_of(layer):
        return mlps
    names = [name for name, _ in layer.named_children()]
    raise ModelError(
        f"tiling.mlp needs decoder layers with an MLP called {', '.join(MLP_NAMES[:-1])} or {MLP_NAMES[-1]}; "
        f"{type(layer).__name__} has {', '.join(names)}. Set tiling.mlp=1."
    )


def _refuse_routers_whose_logits_are_collected(model: Any) -> None:
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        raise ModelError(
            f"tiling.mlp cannot pass on the routers' logits from which {type(model).__name__} computes its "
            "load-balancing loss, got output_router_logits=true in its config. Set tiling.mlp=1, or "
            "output_router_logits to false."
        )


def _random_hidden(model: Any, mlp: nn.Module) -> Tensor:
    """Return a few random tokens in the form that the MLP gets."""
    shape = (_CHECKED_ROWS, _CHECKED_TOKENS, model.config.get_text_config().hidden_size)
    hidden_BTH = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return hidden_BTH.to(next(mlp.parameters()).device, model.dtype)


def _check_token_wise(mlp: nn.Module, hidden_BTH: Tensor) -> None:
    """Compare output with and without tiles, if the weights hold numbers."""
    if hidden_BTH.is_meta:
        log.info("Tiled MLP: not compared with the stock MLP, because the weights are on the meta device.")
        return
    required = [
        parameter
        for parameter in inspect.signature(mlp.forward).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if len(required) == 1 and _equals_in_tiles(mlp, hidden_BTH):
        return
    raise ModelError(
        f"tiling.mlp needs MLPs that take one tensor and process each token separately; {type(mlp).__name__} takes "
        "more, or gives different results for a part of the tokens. Set tiling.mlp=1."
    )


def _equals_in_tiles(mlp: nn.Module, hidden_BTH: Tensor) -> bool:
    with evaluating(mlp), torch.no_grad():
        stock: Any = mlp(hidden_BTH)
        if not isinstance(stock, Tensor) or stock.shape != hidden_BTH.shape:
            return False
        ours = ForwardInTiles(mlp, _CHECKED_TILES).in_tiles(hidden_BTH)
        return _close(ours.view_as(stock), stock)


def _close(ours: Tensor, stock: Tensor) -> bool:
    """Return whether both are equal up to a few roundings of their type, relative to the largest value."""
    tolerance = max(1e-5, 4 * torch.finfo(stock.dtype).eps)
    is_close = (ours - stock).abs().max() <= tolerance * stock.abs().max()
    # Without values, as in a trace, there is nothing to compare: only the memory of the comparison counts.
    return not has_values(is_close) or bool(is_close)
