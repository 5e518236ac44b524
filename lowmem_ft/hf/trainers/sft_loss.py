"""The loss of TRL's SFTTrainer, taken off while a recipe's chunked loss computes it.

TRL before 1.15 replaces the model's forward by one that computes a chunked loss (``loss_type=chunked_nll``, the default
there) and never has logits; later versions compute their loss in ``compute_loss``. Source: TRL 1.14.2 and 1.16.0,
``trainer/sft_trainer.py``.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

from transformers import Trainer

from lowmem_ft.techniques.modules.model_parts import base_model
from lowmem_ft.techniques.modules.patching import set_attribute


def leave_loss_to_model(trainer: Any) -> Iterator[Callable[[], None]]:
    """Let the loss of an ``SFTTrainer`` be that of its model, as in ``Trainer``; yield the calls that undo it."""
    causal_lm = base_model(trainer.model)
    if (replaced := _replaced_by_trl(causal_lm.forward)) is not None:
        yield set_attribute(causal_lm, "forward", replaced)
    yield set_attribute(trainer, "compute_loss", types.MethodType(Trainer.compute_loss, trainer))


def _replaced_by_trl(forward: Any) -> Callable[..., Any] | None:
    """Return the forward that TRL's chunked loss has replaced; None if the model's forward is not TRL's."""
    function = getattr(forward, "__func__", forward)
    if function.__module__ != "trl.trainer.sft_trainer":
        return None
    return inspect.getclosurevars(function).nonlocals["original_forward"]
