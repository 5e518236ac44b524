"""Categories of memory by use, and the phases and places of allocations."""

from __future__ import annotations

from typing import Literal, get_args

Category = Literal[
    "parameter",  # weights, trained and frozen, and a model's buffers
    "gradient",  # the tensor in a parameter's `.grad`
    "optimizer_state",
    "activation",  # made in forward or recomputation and kept for the backward pass
    "logits_and_loss",  # the head's outputs, the loss over them and their gradients
    "input",  # batches copied from the host
    "communication",  # other processes' parts while they are here: gathered weights, buffers of collectives
    "workspace",  # memory that libraries such as cuBLAS hold for themselves
    "temporary",  # freed in the phase that made it
]

CATEGORIES: tuple[Category, ...] = get_args(Category)

Phase = Literal[
    "load",
    "generate",  # prefill and decoding of new tokens
    "score",  # a training step's other forwards without gradients
    "forward",
    "backward",
    "optimizer_step",
    "evaluation",
    "save",
]

PHASES: tuple[Phase, ...] = get_args(Phase)

Place = Literal["device", "managed", "host", "pinned", "disk"]
"""The place of a storage: device memory, CUDA's managed memory (of paged optimizers), pageable or pinned host memory, a
file that is mapped as memory."""
