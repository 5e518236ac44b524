"""The program's current position: its phase of training and its module, and so the purpose of its memory.

The program need not help: autograd tells when a backward pass runs, and hooks on all modules and optimizers tell the
rest. An operator of the backward pass belongs to the module whose forward made its autograd node: nodes carry the
sequence number with which they were created.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_module_registration_hook,
)
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from lowmem_ft.foundation.memory.category import Category, Phase
from lowmem_ft.foundation.tensors.backward_detection import is_in_backward

aten = torch.ops.aten

_ACCUMULATE_GRAD = "torch::autograd::AccumulateGrad"

ProgramState = tuple[Phase, bool]
"""Phase, and True if a module's forward is running, which within a backward pass is a recomputation."""


class Attribution:
    """Phase and module of each operator. Enter it around the program to watch.

    Args:
        device_type: type of the device to watch.
        on_model: called with each model when it is first seen.
        on_part: called with each module that is put into a known model, and its qualified name.
        on_optimizer_step: called with the optimizer after each of its steps.
    """

    def __init__(
        self,
        device_type: str,
        on_model: Callable[[nn.Module], None],
        on_part: Callable[[nn.Module, str], None],
        on_optimizer_step: Callable[[Optimizer], None],
    ) -> None:
        self.phase: Phase = "load"
        self.module = ""
        self.is_accumulating_gradient = False
        self._device_type = device_type
        self._on_model = on_model
        self._on_part = on_part
        self._on_optimizer_step = on_optimizer_step
        self._stack: list[str] = []
        self._fixed: Phase | None = None
        self._outside_backward: Phase = "load"
        self._without_gradients: Phase | None = None
        self._num_steps_running = 0
        self._module_by_sequence: dict[int, str] = {}
        self._last_sequence = 0
        # Weak, as a program may drop a model. Not by id: a parameter that loading replaces leaves its id to the next.
        self._roots: MutableMapping[nn.Module, None] = WeakIdKeyDictionary()
        self._names: MutableMapping[nn.Module, str] = WeakIdKeyDictionary()
        self._owners: MutableMapping[Tensor, str] = WeakTensorKeyDictionary()
        self._heads: set[str] = {""}
        self._hooks = contextlib.ExitStack()

    def __enter__(self) -> Attribution:
        for handle in (
            register_module_forward_pre_hook(self._before_forward),
            register_module_forward_hook(self._after_forward, always_call=True),
            register_module_module_registration_hook(self._after_registration),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ):
            self._hooks.callback(handle.remove)
        self._last_sequence = torch.autograd._get_sequence_nr()
        return self

    def __exit__(self, *exception: object) -> None:
        self._hooks.close()

    @contextlib.contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Attribute everything in a block to one phase, such as ``load`` or ``evaluation``."""
        before, self._fixed = self._fixed, phase
        self.phase = phase
        try:
            yield
        finally:
            self._fixed = before

    @contextlib.contextmanager
    def generating(self) -> Iterator[None]:
        """Attribute everything in a block to generation; what follows it is no part of an optimizer's step."""
        self._outside_backward = "forward"
        with self.during("generate"):
            yield

    @contextlib.contextmanager
    def scoring(self) -> Iterator[None]:
        """Attribute forwards without gradients in a block to scoring: a block that trains does them for its loss."""
        before, self._without_gradients = self._without_gradients, "score"
        try:
            yield
        finally:
            self._without_gradients = before

    @contextlib.contextmanager
    def within(self, module: nn.Module) -> Iterator[None]:
        """Attribute everything in a block to a module, though its forward does not run."""
        self._stack.append(self._names.get(module, ""))
        try:
            yield
        finally:
            self._stack.pop()

    def name_modules(self, root: nn.Module) -> None:
        """Learn the qualified names of a model's modules, and the owner of each parameter."""
        self._roots[root] = None
        for name, module in root.named_modules():
            self._names[module] = name
            for parameter in module.parameters(recurse=False):
                self._owners[parameter] = name
        get_head: Any = getattr(root, "get_output_embeddings", lambda: None)
        head = get_head()
        if head is not None:
            self._heads.add(self._names[head])
        self._on_model(root)

    def takes_for_outermost(self, wrapper: nn.Module) -> None:
        """Give a wrapper of a known model the model's name, so that the names within stay."""
        self._names[wrapper] = ""

    def starts_over(self) -> None:
        """Take what runs from now on for the beginning of a program: an error has ended what ran."""
        self._num_steps_running = 0  # no hook runs after a step that fails
        self._outside_backward = "load"

    @property
    def moment(self) -> ProgramState:
        """The current moment, as far as a storage's category depends on when it is created or freed."""
        return self.phase, bool(self._stack)

    @property
    def inherits_module(self) -> bool:
        """True if results belong to the module of their inputs, as in an optimizer's step."""
        return self.phase in ("optimizer_step", "load", "save")

    def operator_begins(self, func: Any, args: tuple[Any, ...]) -> None:
        """Update phase and module; called before each operator."""
        self.is_accumulating_gradient = False
        self.module = self._stack[-1] if self._stack else ""
        if is_in_backward():
            self.phase = self._fixed or "backward"
            self._outside_backward = "optimizer_step"  # clipping, the step, until the next batch comes
            if not self._stack:
                self._ask_autograd_node()
                return
        else:
            is_between = self._outside_backward == "optimizer_step" and not self._num_steps_running
            if is_between and self.comes_from_host(func, args):
                self._outside_backward = "forward"  # the next batch
            self.phase = self._fixed or (
                "optimizer_step" if self._num_steps_running else self._outside_backward
            )
        self._learn_sequence()

    def comes_from_host(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Return whether an operator copies a tensor from the host to the device."""
        return func is aten._to_copy.default and self._device_type != "cpu" and args[0].device.type == "cpu"

    def category_at_birth(self, func: Any, args: tuple[Any, ...]) -> Category:
        """Return the category of a new storage, as far as it is known yet."""
        if self.is_accumulating_gradient:
            return "gradient"
        if self.phase in ("optimizer_step", "save", "load"):
            return "temporary"
        if self.comes_from_host(func, args):
            return "input"
        if self.module in self._heads:
            return "logits_and_loss"
        if self.phase == "backward" and not self._stack:
            return "temporary"
        return "activation"

    def category_at_death(self, category: Category, birth: ProgramState) -> Category:
        """Return the final category of a storage: one freed before the backward pass reaches it is temporary."""
        if category != "activation":
            return category
        phase, in_forward = birth
        is_kept = phase != self.phase or (phase == "backward" and in_forward and not self._stack)
        return "activation" if is_kept else "temporary"

    def owner_of(self, parameter: Tensor) -> str:
        """Return the name of the module that holds a parameter; empty if no module does."""
        if parameter not in self._owners:
            for root in list(self._roots):
                self.name_modules(root)
        return self._owners.setdefault(parameter, "")

    def _learn_sequence(self) -> None:
        """Attribute the autograd nodes made since the last operator to the running module."""
        now = torch.autograd._get_sequence_nr()
        for number in range(self._last_sequence, now):
            self._module_by_sequence[number] = self.module
        self._last_sequence = now

    def _ask_autograd_node(self) -> None:
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return
        if node.name() == _ACCUMULATE_GRAD:
            self.is_accumulating_gradient = not self._num_steps_running  # an optimizer may step in its hooks
            self.module = self.owner_of(node.variable)
        else:
            self.module = self._module_by_sequence.get(node._sequence_nr(), "")

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if not self._stack and not is_in_backward():
            if module not in self._names:
                self.name_modules(module)
            if self._fixed is None:
                self._outside_backward = self._phase_of_forward(module)
        self._stack.append(self._names.get(module, self._stack[-1] if self._stack else ""))

    def _phase_of_forward(self, module: nn.Module) -> Phase:
        if torch.is_grad_enabled():
            return "forward"
        return self._without_gradients or ("forward" if module.training else "evaluation")

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._learn_sequence()
        self._stack.pop()

    def _after_registration(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        """Report modules that join a known model part by part, as adapters do."""
        parent_name = self._names.get(parent)
        if parent_name is not None and child is not None:
            self._on_part(child, f"{parent_name}.{name}" if parent_name else name)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        self._num_steps_running += 1
        first = len(args) > 1 and args[1]  # after the optimizer itself
        if callable(first):
            return (args[0], self._outside_step(first), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._outside_step(kwargs["closure"])}
        return None

    def _outside_step(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Count a closure for the loss as outside the step: it runs a forward and a backward. Lightning has one."""

        @functools.wraps(closure)
        def call() -> Any:
            running, self._num_steps_running = self._num_steps_running, 0
            try:
                return closure()
            finally:
                self._num_steps_running = running

        return call

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._num_steps_running -= 1
        self._outside_backward = "optimizer_step"
        self._on_optimizer_step(optimizer)
