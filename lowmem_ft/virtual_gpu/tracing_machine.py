"""A machine without values: it runs programs on fake tensors, and traces the memory and the work they need."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.memory.category import Category, Phase
from lowmem_ft.foundation.memory.memory_estimate import ModelSize
from lowmem_ft.foundation.repetition import abridged_for
from lowmem_ft.foundation.system.garbage_collector import collector_paused
from lowmem_ft.foundation.system.interrupts import defer_signals
from lowmem_ft.foundation.tensors.backward_detection import is_in_backward
from lowmem_ft.foundation.tensors.logical_size import num_parameters
from lowmem_ft.foundation.tensors.storage_resizing import storage_resizes_seen
from lowmem_ft.foundation.upstream.patches import wrap
from lowmem_ft.foundation.upstream.tested import warn_if_untested
from lowmem_ft.virtual_gpu.calls.fake_results import Check, FakeResults
from lowmem_ft.virtual_gpu.calls.trace import Trace
from lowmem_ft.virtual_gpu.calls.work import BETWEEN_STEPS, MICRO_BATCH_BEGIN, MICRO_BATCH_END, STEP_END
from lowmem_ft.virtual_gpu.costs.one_process import Peers, virtual_process_groups
from lowmem_ft.virtual_gpu.cuda.cuda_names import (
    another_process_to_accelerate,
    no_accelerator,
    on_virtual_device,
    without_index,
)
from lowmem_ft.virtual_gpu.device.guard import errors_of_hooks_raised
from lowmem_ft.virtual_gpu.device.placement import place_module
from lowmem_ft.virtual_gpu.kernels.index_writes import check_index_writes
from lowmem_ft.virtual_gpu.recording.attribution import Attribution
from lowmem_ft.virtual_gpu.recording.compiled_code import CompiledCode
from lowmem_ft.virtual_gpu.recording.optimizer_state import check_state, state_tensors
from lowmem_ft.virtual_gpu.recording.recorder import Recorder
from lowmem_ft.virtual_gpu.recording.untraceable import what_cannot_be_traced
from lowmem_ft.virtual_gpu.upstream.bitsandbytes_fakes import bitsandbytes_on_virtual_gpu
from lowmem_ft.virtual_gpu.upstream.bitsandbytes_weights import statistics_of
from lowmem_ft.virtual_gpu.upstream.ctc_loss import ctc_loss_without_values
from lowmem_ft.virtual_gpu.upstream.data_loading import workers_in_this_process
from lowmem_ft.virtual_gpu.upstream.experts import experts_as_if_real
from lowmem_ft.virtual_gpu.upstream.fake_tensor_patches import FakeMode, fake_tensors_in_disguise
from lowmem_ft.virtual_gpu.upstream.generation import beam_search_to_its_length
from lowmem_ft.virtual_gpu.upstream.host_python import host_python_counted
from lowmem_ft.virtual_gpu.upstream.other_threads import followed_thread
from lowmem_ft.virtual_gpu.upstream.peft_adapters import pefts_adapters_without_values
from lowmem_ft.virtual_gpu.upstream.recurrent_layers import packed_sequences_without_values
from lowmem_ft.virtual_gpu.upstream.weight_files import nothing_saved, shapes_of_checkpoints
from lowmem_ft.virtual_gpu.values.constant_propagation import depends_on_values, known_values, read_values
from lowmem_ft.virtual_gpu.values.questions import Questions

if TYPE_CHECKING:
    from typing_extensions import Self

ModuleT = TypeVar("ModuleT", bound=nn.Module)


COUNTED_IN = "LOWMEM_FT_COUNT_TRACES"
"""Variable that names a file, to which each trace adds a line: so tests count them, those of their children too."""


class TracingMachine:
    """Runs any PyTorch program on fake tensors, and records its memory and its work.

    By itself it models this machine without a GPU: fake tensors on ``cpu`` go through the CPU's own operators.
    :class:`VirtualGPU` adds a CUDA device.

    Attributes:
        device: the device to put the model and the batches on.
        recorder: the recorder of the memory timeline.
        work: the log of kernels and copies.
        compiled: what the program compiles.
        choices: decisions made while tracing, in the order of their first mention.
        trace_seconds: seconds for which programs have run on it.
        keeps_files_away: whether files of a program go elsewhere, so that it may save: set before its block.
        peers: the ranks of the program, of which it runs one: set before its block.
    """

    def __init__(
        self, device: torch.device | None = None, *, check: Check | None = None, **rules: Any
    ) -> None:
        self.device = device = device or torch.device("cpu")
        self.choices: list[str] = []
        self.attribution = Attribution(
            device.type, self._adopt, self._mark_parameters, self._after_optimizer_step
        )
        self.compiled = CompiledCode()
        self._fake_mode = FakeMode(without_index if device.type == "cpu" else on_virtual_device)
        results = FakeResults(self._fake_mode, device.type, check or check_index_writes)
        questions = Questions(self.say)
        self.recorder = Recorder(
            device.type, self.attribution, questions, results=results, fake_mode=self._fake_mode, **rules
        )
        self.work = self.recorder.work
        self._model_name = ""
        self._num_parameters = 0
        self._num_trainable_parameters = 0
        self._is_quantized = False
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._running = contextlib.ExitStack()
        self._entered_at: float | None = None
        self.trace_seconds = 0.0
        self.keeps_files_away = False
        self.peers = Peers()

    def __enter__(self) -> Self:
        if self._entered_at is not None:
            raise UserError(
                f"A {type(self).__name__} runs one `with` block, and this one has. Make another for the next program."
            )
        warn_if_untested()
        if counted_in := os.environ.get(COUNTED_IN):
            with open(counted_in, "a") as file:
                file.write(type(self).__name__ + "\n")
        self._entered_at = time.perf_counter()
        with contextlib.ExitStack() as undo:
            undo.push(self._running)  # which patches of modules imported later join
            self._enter(self._running)
            undo.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.recorder.close()
        assert self._entered_at is not None
        self.trace_seconds = time.perf_counter() - self._entered_at
        self._running.__exit__(*exception)
        warn_if_untested()  # for libraries that the program has imported meanwhile
        untraceable = what_cannot_be_traced(exception[1])
        if untraceable is not None:
            raise untraceable from exception[1]

    def _enter(self, stack: contextlib.ExitStack) -> None:
        stack.enter_context(collector_paused())
        # A backward pass on a virtual device is Python that C++ calls, and an exception would end the process there by
        # `std::terminate`, without a message.
        stack.enter_context(defer_signals(is_in_backward))
        # Autograd's own threads would not see this thread's modes.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(errors_of_hooks_raised())
        stack.enter_context(followed_thread())
        stack.enter_context(self._fake_mode)
        fake_tensors_in_disguise(stack, self._read_values, self._list_values)
        ctc_loss_without_values(stack)
        packed_sequences_without_values(stack)
        workers_in_this_process(stack)
        shapes_of_checkpoints(stack)
        if not self.keeps_files_away:
            nothing_saved(stack, self.say)
        experts_as_if_real(stack)
        beam_search_to_its_length(stack)
        pefts_adapters_without_values(stack)
        bitsandbytes_on_virtual_gpu(stack)
        self.compiled.apply(stack)
        if self.device.type == "cpu":
            no_accelerator(stack)
        if self.device.type == "cpu" and self.peers.num_processes > 1:
            virtual_process_groups(stack, self.peers, self.mark, self.say)
            stack.enter_context(another_process_to_accelerate())
        stack.enter_context(self.attribution)
        stack.enter_context(abridged_for(self.recorder.alike))
        stack.enter_context(storage_resizes_seen(self.recorder.storage_is_resized))
        stack.enter_context(host_python_counted(self.recorder.python_runs))
        stack.enter_context(self.recorder)
        if (
            self.recorder.as_torch_reports and self.device.type == "cpu"
        ):  # on a GPU they are the host's, which has other things of 5 kB to count
            wrap(stack, torch, "get_rng_state", self._count_state)

    def _count_state(self, get_state: Callable[..., Tensor], *args: Any) -> Tensor:
        """Count a random state, of which checkpointing keeps one for each layer."""
        state = get_state(*args)
        self.recorder.adopt(state)
        return state

    def place(
        self,
        model: ModuleT,
        device: torch.device | None = None,
        new_parameter: Callable[[nn.Parameter], Tensor] | None = None,
    ) -> ModuleT:
        """Move a model built on the meta device to this machine, in place.

        Make the optimizer afterwards: it holds the parameters themselves.

        Args:
            model: any module.
            device: the machine's device or its host; None: the former.
            new_parameter: makes the tensor that replaces a parameter; None: a tensor of its shape.

        Returns:
            The model.
        """
        with self.attribution.during("load"):
            place_module(model, device or self.device, self._placed, new_parameter)
        self.attribution.name_modules(model)
        return model

    def warm_up_allocator(self, num_bytes: int) -> None:
        """Allocate memory for all weights at once and free it, as ``from_pretrained`` does on a GPU.

        The weights are then carved out of that one segment, which decides what is reserved.
        Source: transformers, ``modeling_utils.caching_allocator_warmup``.
        """
        if self.device.type != "cpu":
            with self.attribution.during("load"):
                self.recorder.let_go(self.recorder.hold(num_bytes, "temporary"))

    def say(self, choice: str) -> None:
        """Note a decision for users once; leave out those of checks at load, which no step repeats."""
        is_check = self.attribution.phase == "load" and self.attribution.module != ""
        if choice not in self.choices and not is_check:
            self.choices.append(choice)

    @contextlib.contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Mark a block as one micro-batch, for the clock."""
        self.work.mark(MICRO_BATCH_BEGIN)
        yield
        self.work.mark(MICRO_BATCH_END)

    def step_is_over(self) -> None:
        """Mark a point where nothing of the last optimizer step is left, so that a step could start here."""
        self.work.mark(BETWEEN_STEPS)

    def mark(self, tensor: Tensor, category: Category, *, of: nn.Parameter | None = None) -> None:
        """Set a tensor's category and its module, where the machine cannot infer them."""
        owner = None if of is None else self.attribution.owner_of(of)
        self.recorder.mark(tensor, category, owner)

    def mark_shared(self, tensor: Tensor, category: Category) -> None:
        """Set the category of memory that several modules share, one after the other."""
        self.recorder.mark_shared(tensor, category)

    def take_host_memory(self, tensor: Tensor, category: Category) -> None:
        """Set the category of a new host tensor in memory that is allocated on demand and kept."""
        self.mark(tensor, category)
        self.recorder.stays(tensor)

    def mark_state(self, optimizer: Optimizer) -> None:
        """Mark what an optimizer keeps for its parameters as optimizer state."""
        for parameter, tensor in state_tensors(optimizer):
            self.recorder.mark(tensor, "optimizer_state", self.attribution.owner_of(parameter))

    def mark_weights(self, model: nn.Module) -> None:
        """Mark a model's parameters and their gradients as such, whoever has allocated them."""
        for parameter in model.parameters():
            owner = self.attribution.owner_of(parameter)
            self.recorder.mark(parameter, "parameter", owner)
            if parameter.grad is not None:
                self.recorder.mark(parameter.grad, "gradient", owner)

    def trace(self, model_name: str = "") -> Trace:
        """Return the trace recorded so far.

        Args:
            model_name: name for the model; empty: its class.
        """
        return Trace(
            timeline=self.recorder.timeline,
            work=self.work.entries,
            model=ModelSize(
                name=model_name or self._model_name,
                parameters=self._num_parameters,
                trainable_parameters=self._num_trainable_parameters,
            ),
            is_quantized=self._is_quantized,
            choices=tuple(filter(None, (*self.choices, self.compiled.in_words()))),
            assumed_largest=tuple(sorted(self.recorder.largest_assumed)),
            uncertain_bytes=self.recorder.timeline.most_bytes_of(self.recorder.of_uncertain_size),
            does_routing_decide=self.recorder.does_routing_decide,
        )

    def during(self, phase: Phase) -> contextlib.AbstractContextManager[None]:
        """Attribute everything in a block to one phase."""
        return self.attribution.during(phase)

    def _read_values(self, tensor: Tensor) -> Tensor:
        """Let metrics read unknown values, but not the forward of a module, which would compute with them."""
        _, is_in_forward = self.attribution.moment
        if is_in_forward and known_values(tensor) is None:
            raise depends_on_values("Tensor.numpy()")
        self.recorder.host_reads(tensor)
        return read_values(tensor, 1 if _is_integer(tensor) else 0)

    def _list_values(self, tensor: Tensor) -> Tensor:
        """Answer with one question, however many elements there are."""
        self.recorder.host_reads(tensor)
        return read_values(tensor, 0 if known_values(tensor) is not None else self.recorder.ask(tensor.dtype))

    def _placed(self, module: str, tensor: Tensor) -> None:
        self.recorder.mark(tensor, "parameter", module)

    def _adopt(self, root: nn.Module) -> None:
        """Take up a model, placed or loaded by its own means: mark all that it holds as parameters or buffers."""
        self._mark_parameters(root)
        total, trainable = num_parameters(root)
        if total > self._num_parameters:  # not a part of the model that is called by itself
            kind = type(getattr(root, "_orig_mod", root))  # not the compiled model's wrapper
            sharded = issubclass(kind, FSDPModule)  # in place of the model's own class
            self._model_name = kind.__bases__[1].__name__ if sharded else kind.__name__
            self._num_parameters, self._num_trainable_parameters = total, trainable
            self._is_quantized = not all(parameter.is_floating_point() for parameter in root.parameters())

    def _mark_parameters(self, root: nn.Module, prefix: str = "") -> None:
        for name, module in root.named_modules(prefix=prefix):
            tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            scales = [part for owner in (*tensors, module) for part in statistics_of(owner)]
            for tensor in (*tensors, *scales):
                self.recorder.mark(tensor, "parameter", name)

    def _after_optimizer_step(self, optimizer: Optimizer) -> None:
        """Mark the end of a step. It is one step until an optimizer steps again: each parameter may have its own."""
        if optimizer in self._stepped:
            self._stepped.clear()
        if self._stepped:
            self.work.postpone(STEP_END)
        else:
            self.work.mark(STEP_END)
        self._stepped.add(optimizer)
        self.mark_state(optimizer)
        check_state(optimizer, self.recorder.booked_bytes)


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
