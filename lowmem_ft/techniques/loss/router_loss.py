"""The load-balancing loss of a mixture's routers, which a model adds to its own loss if its config asks for it.

transformers computes it over the router logits of one forward (``output_router_logits``), and adds it times
``router_aux_loss_coef``. The loss of a window takes the mean over its forwards, in all processes, as TRL's does: else
the coefficient would grow with ``gradient_accumulation_steps``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.foundation.handle import Handle
from lowmem_ft.techniques.modules.model_parts import base_model
from lowmem_ft.techniques.modules.patching import set_attribute

logger = logging.getLogger(__name__)

_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
"""Attributes of a model or config for the weight of the loss: Mixtral and most others, JetMoE."""
_FUNCTION = "load_balancing_loss_func"
"""Function of a family's module that computes the loss, and takes a padding mask."""


def has_router_loss(model: Any) -> bool:
    """Return whether a model's config asks for the routers' logits, and with them for their loss."""
    config = getattr(model, "config", None)
    return config is not None and bool(getattr(config.get_text_config(), "output_router_logits", False))


def weighted_router_loss(model: Any, outputs: Any) -> Tensor | None:
    """Return what the stock forward adds to its loss for the routers, 0-d; None: nothing.

    Args:
        model: a causal LM, or a PEFT model around one.
        outputs: the outputs of its forward.

    Raises:
        ModelError: if it is not known how the model weighs the loss.
    """
    loss = getattr(outputs, "aux_loss", None)
    if not isinstance(loss, Tensor):
        return None
    causal_lm = base_model(model)
    holders = (causal_lm, causal_lm.config.get_text_config())
    found = [getattr(holder, name) for holder in holders for name in _COEFFICIENTS if hasattr(holder, name)]
    if not found:
        raise ModelError(
            f"It is not known how {type(causal_lm).__name__} weighs the load-balancing loss of its routers, which has "
            "to be the mean over all forwards of a step: it has neither router_aux_loss_coef nor aux_loss_coef. Set "
            "output_router_logits=false in its config."
        )
    return found[0] * loss


@contextlib.contextmanager
def router_loss_off(model: nn.Module) -> Iterator[None]:
    """Disable the router loss within a block: an evaluation measures only the language loss."""
    with Handle() as off:
        if has_router_loss(model):
            config: Any = model.config
            off.undo_first(set_attribute(config.get_text_config(), "output_router_logits", False))
        yield


@contextlib.contextmanager
def padding_left_out(model: Any, lengths: Sequence[int] | None, shape_BT: torch.Size) -> Iterator[None]:
    """Let the routers' loss leave padding out within a block; attention gets no mask (see ``LabelledRows``).

    Args:
        model: a causal LM, or a PEFT model around one.
        lengths: tokens of each row before its padding; None: no row has padding.
        shape_BT: rows, and tokens of a row.

    Raises:
        ModelError: if the model does not pass a padding mask to its router loss.
    """
    if lengths is None or not has_router_loss(model) or min(lengths) == shape_BT[1]:
        yield
        return
    causal_lm = base_model(model)
    # FSDP2 makes a class of its own out of the model's.
    modules = (sys.modules[kind.__module__] for kind in type(causal_lm).__mro__)
    module = next((module for module in modules if hasattr(module, _FUNCTION)), None)
    stock = getattr(module, _FUNCTION, None)
    if module is None or stock is None or "attention_mask" not in inspect.signature(stock).parameters:
        raise ModelError(
            f"The load-balancing loss of {type(causal_lm).__name__}'s routers would count padding: its module has no "
            f"{_FUNCTION} that takes a mask. Set output_router_logits=false in its config."
        )
    mask_BT = torch.arange(shape_BT[1]) < torch.tensor(lengths)[:, None]
    with Handle(set_attribute(module, _FUNCTION, _masked(stock, mask_BT))):
        yield


def _masked(stock: Callable[..., Any], mask_BT: Tensor) -> Callable[..., Any]:
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def masked(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        return stock(**{**arguments, "attention_mask": mask_BT})

    return masked


def log_router_loss(model: Any) -> None:
    """Log what a mixture's config says about the loss of its routers; say nothing about a model that has none."""
    causal_lm = base_model(model)
    config = causal_lm.config.get_text_config()
    coefficient = next((getattr(config, name) for name in _COEFFICIENTS if hasattr(config, name)), None)
    if coefficient is None or not hasattr(config, "output_router_logits"):
        return
    if has_router_loss(causal_lm):
        logger.info("Routers: the loss includes %g of their load-balancing loss, aux_loss.", coefficient)
    else:
        logger.info(
            "Routers: no load-balancing loss is added, as the model's config has output_router_logits=false; its "
            "coefficient of %g has no effect.",
            coefficient,
        )
