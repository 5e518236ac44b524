"""A model's own loss where a chunked one is off: it has to be a mean over the tokens of all micro-batches of a step."""

from __future__ import annotations

import inspect
from typing import Any

from lowmem_ft.foundation.errors import ModelError


def refuse_mean_of_means(model: Any) -> None:
    """Refuse a model whose own loss ignores the window's token count.

    Args:
        model: a causal LM, or a PEFT model around one, without a chunked loss.

    Raises:
        ModelError: if its forward does not take ``num_items_in_batch``.
    """
    takes_any = any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD
        for parameter in inspect.signature(model.forward).parameters.values()
    )
    if not takes_any or getattr(model, "accepts_loss_kwargs", None) is False:
        raise ModelError(
            "loss.chunk_tokens=null needs a model whose own loss takes num_items_in_batch, but that of "
            f"{type(model).__name__} does not: it would weight tokens by the size of their micro-batch. Set "
            "loss.chunk_tokens=1024."
        )
