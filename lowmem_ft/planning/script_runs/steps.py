"""The optimizer steps of a user's script: counted, with the script ended after enough of them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lowmem_ft.foundation.tensors.backward_detection import is_in_backward
from lowmem_ft.foundation.upstream.patches import wrap
from lowmem_ft.virtual_gpu.tracing_machine import TracingMachine

MOST_BACKWARDS = 256
"""The most backward passes without an optimizer step: more micro-batches hardly make one, and a script that updates
weights by hand has no such step.
"""


class Enough(BaseException):
    """The signal that enough steps have been seen.

    Not an ``Exception``: a script that continues after an error must not continue after this.
    """


@dataclass(frozen=True, kw_only=True)
class SeenStep:
    """One step of the main optimizer.

    Args:
        kept_bytes: bytes on the device as the step ends: weights, gradients, optimizer state and everything else.
        tokens: tokens that the model was given to learn from, padding included; 0: it has no embedding.
        host_waits: how often the host has waited for the device up to then.
    """

    kept_bytes: int
    tokens: int
    host_waits: int


@dataclass(slots=True)
class _Seen:
    """The steps seen of an optimizer, and its size in parameters."""

    size: int
    steps: list[SeenStep]


class StepWatch:
    """Counts the steps of the main optimizer, the one with the most parameters, and ends the script before one more.

    Args:
        machine: the machine that the script runs on.
        num_steps: steps to see.
        on_step: called with the number of each step as it ends.
    """

    def __init__(self, machine: TracingMachine, num_steps: int, on_step: Callable[[int], None]) -> None:
        self.num_steps = num_steps
        self._machine = machine
        self._on_step = on_step
        self._optimizers: dict[int, _Seen] = {}
        self._backwards: list[SeenStep] = []
        self._is_enough = False
        self._tokens_before = 0
        self._tokens: dict[int, int] = {}
        """Tokens of the current step, by the number of rows of the embedding that they went through."""

    def apply(self, undo: contextlib.ExitStack) -> None:
        """Watch the code that runs from now on, on the machine, until the stack is undone."""
        for handle in (
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
            register_module_forward_pre_hook(self._before_forward),
        ):
            undo.callback(handle.remove)
        wrap(undo, torch.autograd, "backward", self._follow)

    @property
    def steps(self) -> list[SeenStep]:
        """The steps of the main optimizer; without one, the last backward passes."""
        return self._optimizer_steps or self._backwards[-self.num_steps :]

    @property
    def num_backwards(self) -> int | None:
        """The number of backward passes without an optimizer; None: there is one."""
        return None if self._optimizer_steps else len(self._backwards)

    @property
    def _optimizer_steps(self) -> list[SeenStep]:
        return max(self._optimizers.values(), key=lambda seen: seen.size).steps if self._optimizers else []

    def forget(self) -> None:
        """Forget what was seen: an error has ended it, and the script may start over."""
        self._optimizers.clear()
        self._backwards.clear()
        self._tokens.clear()
        self._tokens_before = 0

    def host_waits(self) -> int | None:
        """Return how often the host waited for the device in the last step; None if only one was seen."""
        if len(self.steps) < 2:
            return None
        before, last = self.steps[-2:]
        return last.host_waits - before.host_waits

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) not in self._optimizers:
            size = sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
            self._optimizers[id(optimizer)] = _Seen(size, [])
        if self._is_main(optimizer) and len(self._optimizer_steps) >= self.num_steps:
            self._is_enough = True
            if not is_in_backward():  # half a pass would be taken for the end of the last step
                raise Enough

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_enough or id(optimizer) not in self._optimizers or not self._is_main(optimizer):
            return
        self._optimizer_steps.append(self._seen_now())
        self._tokens.clear()
        self._on_step(len(self._optimizer_steps))

    def _seen_now(self) -> SeenStep:
        return SeenStep(
            kept_bytes=self._machine.recorder.live_bytes,
            tokens=self._tokens.get(max(self._tokens, default=0), 0),
            host_waits=self._machine.work.num_host_waits,
        )

    def _is_main(self, optimizer: Optimizer) -> bool:
        return self._optimizers[id(optimizer)].steps is self._optimizer_steps

    def _follow(self, backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """End a script whose optimizers step in backward, or that continues without one, whose passes are recorded."""
        if len(self._backwards) >= MOST_BACKWARDS:
            raise Enough
        result = backward(*args, **kwargs)
        if self._is_enough:
            raise Enough
        if not self._optimizers:
            seen = self._seen_now()
            before, self._tokens_before = self._tokens_before, seen.tokens
            self._backwards.append(dataclasses.replace(seen, tokens=seen.tokens - before))
        return result

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Count the tokens that enter the largest embedding, except in a forward without gradients."""
        if isinstance(module, nn.Embedding) and args and torch.is_grad_enabled():
            if is_in_backward():
                return
            rows = module.num_embeddings
            self._tokens[rows] = self._tokens.get(rows, 0) + args[0].numel()
