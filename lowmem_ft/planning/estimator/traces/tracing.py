"""The recipe's own step, run on a tracing machine: build, optimizer steps, evaluation.

Nothing here knows a technique. Whatever ``training/runtimes/build.py`` builds is traced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from transformers import PretrainedConfig

from lowmem_ft.data.batches.batch import Batch
from lowmem_ft.foundation.errors import ModelError, raise_problems
from lowmem_ft.foundation.packages import is_installed
from lowmem_ft.foundation.system.garbage_collector import collector_paused
from lowmem_ft.models.files.model_files import num_layers_of
from lowmem_ft.models.hf_config import load_model_config, max_positions, vocab_size
from lowmem_ft.planning.estimator.runtime import model_on_meta, virtual_runtime
from lowmem_ft.planning.estimator.traced_answers import trace_answer
from lowmem_ft.planning.estimator.traces.forked_trace import Take, forked_trace
from lowmem_ft.planning.estimator.traces.repeated_layers import ShallowModel, stand_ins, with_num_layers
from lowmem_ft.planning.estimator.traces.trace_cache import KeptTraces
from lowmem_ft.planning.estimator.traces.trace_key import TraceKey, trace_key
from lowmem_ft.planning.estimator.traces.traced_recipe import ShortTrace, TracedRecipe
from lowmem_ft.planning.estimator.worst_batch import refuse_too_many_tokens, row_length, worst_batch
from lowmem_ft.recipe import Recipe
from lowmem_ft.techniques.technique import Techniques
from lowmem_ft.training.out_of_memory.retry import Retries
from lowmem_ft.training.runtimes.build import Plan, build_session, plan_session
from lowmem_ft.training.step.deterministic_kernels import deterministic_kernels
from lowmem_ft.training.step.session import Session
from lowmem_ft.training.step.step import evaluation_loss
from lowmem_ft.virtual_gpu.costs.one_process import one_of_several
from lowmem_ft.virtual_gpu.replay.depth.layer_passes import NotRegularError
from lowmem_ft.virtual_gpu.replay.depth.repetition_proof import prove
from lowmem_ft.virtual_gpu.tracing_machine import TracingMachine

logger = logging.getLogger(__name__)

_NO_NUMPY = ".numpy() is not supported for tensor subclasses"
"""Words of the plain RuntimeError with which torch refuses to make an array of a fake tensor."""

LONG_SECONDS = 30.0
"""Seconds of processor time for one trace: several times what the largest shipped recipe takes, however busy the
machine is.
"""

NUM_STEPS = 2
"""The first step creates the optimizer state, so the second is the first to hold all of it."""

NUM_MICRO_BATCHES = 2
"""The most micro-batches traced per step, in horizontal order: from the second on, each adds to the gradients of those
before, and nothing else changes.
"""


@collector_paused()
def trace_recipe(
    recipe: Recipe,
    new_machine: Callable[[], TracingMachine],
    *,
    extend: bool = True,
    kept: KeptTraces | None = None,
    machine: object = None,
    process_index: int = 0,
) -> TracedRecipe:
    """Trace everything that the recipe takes on a machine, at its worst batch.

    A deep model is traced twice, with a few of its layers, and the trace extended, where the two traces show that this
    is exact; else all of it is traced. What traces of another recipe have shown is reused where it holds.

    Args:
        recipe: the recipe to train; its data is not read.
        new_machine: makes a machine of the kind in question.
        extend: whether a trace may be extended.
        kept: earlier traces, and where to keep this one; None: neither.
        machine: with ``kept``: the properties of the machine that decide which kernels run and what they take.
        process_index: the rank that is traced, if the recipe has several processes.

    Returns:
        The trace of load, two optimizer steps and, if the recipe asks for them, an evaluation and an answer.

    Raises:
        UserError: if the machine cannot run the recipe.
        ModelError: if the model cannot be found, or its forward cannot be traced.
    """
    hf_config = load_model_config(recipe.model, architecture_only=True)
    if num_layers := num_layers_of(lambda name: getattr(hf_config, name, None)):
        raise_problems(recipe.checkpointing.problems_with(num_layers))  # of which a few represent all below
    with deterministic_kernels(recipe.training.full_determinism):
        if not extend:
            refuse_too_many_tokens(recipe, hf_config)
            return trace_layers(recipe, hf_config, new_machine(), process_index)
        tracing = _ShortTracing(recipe, hf_config, new_machine, kept or KeptTraces(), machine, process_index)
        return tracing.find().whole()


def is_cut_unevenly(recipe: Recipe) -> bool:
    """Return whether the last rank of FSDP2 has fewer rows of some weight than the first."""
    plan = recipe.distributed.plan()
    if not (plan.shards_rows and plan.several):
        return False
    model = model_on_meta(recipe.model, load_model_config(recipe.model, architecture_only=True))
    return not all(plan.cuts_evenly(len(weight)) for weight in model.parameters())


class _ShortTracing:
    """Finds or makes the trace of a few layers, and how that of all follows; traces all if the layers do not repeat.

    Args:
        recipe: the recipe to train.
        hf_config: its architecture.
        new_machine: makes a machine.
        kept: earlier traces.
        machine: see :func:`trace_recipe`.
        process_index: likewise.
    """

    def __init__(
        self,
        recipe: Recipe,
        hf_config: PretrainedConfig,
        new_machine: Callable[[], TracingMachine],
        kept: KeptTraces,
        machine: object,
        process_index: int = 0,
    ) -> None:
        self._recipe = recipe
        self._hf_config = hf_config
        self._new_machine = new_machine
        self._kept = kept
        self._machine = (machine, process_index) if process_index else machine
        self._process_index = process_index
        self._traced: dict[tuple[object, ...], TracedRecipe] = {}

    def find(self) -> ShortTrace:
        """Return the kept trace, or make one and keep it."""
        key = trace_key(self._recipe, self._hf_config, self._machine)
        found = None if key is None else self._kept.find(key)
        if found is not None:
            return found
        shallow = stand_ins(self._recipe, model_on_meta(self._recipe.model, self._hf_config))
        refuse_too_many_tokens(self._recipe, self._hf_config)  # after errors about the model
        short = self._of_stand_ins(shallow) if shallow else None
        if short is None:
            short = ShortTrace(
                traced=trace_layers(self._recipe, self._hf_config, self._new_machine(), self._process_index)
            )
            if key is not None:
                self._kept.keep(key, short)
        return short

    def _of_stand_ins(self, stand_ins: list[ShallowModel]) -> ShortTrace | None:
        """Return the trace of a few layers, if it or another one shows how all of them follow; else None."""
        keys = {stand_in: self._key_of(stand_in) for stand_in in stand_ins}
        for stand_in in sorted(stand_ins, key=lambda stand_in: self._how_unknown(keys[stand_in], stand_in)):
            key = keys[stand_in]
            found = None if key is None else self._kept.find(key)
            if found and found.repetition and found.repetition.layers != stand_in.layers:
                found = None  # as many layers, which repeat in other stretches there
            try:
                short = found or self._shown(stand_in, key)
                assert short.repetition is not None, "anything that does not repeat is kept unchanged"
                short.repetition.refuse_depth(short.traced.trace, stand_in.more)
            except NotRegularError as error:
                logger.info("%d layers cannot represent all layers: %s.", stand_in.num_layers, error)
                continue
            if key is not None and found is None:
                self._kept.keep(key, short)
            return dataclasses.replace(short, more=stand_in.more)
        return None

    def _how_unknown(self, key: TraceKey | None, stand_in: ShallowModel) -> int:
        """Rank a stand-in: it repeats as the latest trace of the program does, as another of the model, or neither."""
        if key is None:
            return 2
        return (
            0 if self._kept.layers(key) == stand_in.layers else 1 + (not self._kept.has(key, stand_in.layers))
        )

    def _shown(self, stand_in: ShallowModel, key: TraceKey | None) -> ShortTrace:
        """Return the stand-in's trace, and how it repeats.

        Raises:
            NotRegularError: if it does not repeat.
        """
        longer = stand_in.longer()
        with self._traced_in_parallel(longer, stand_in) as take:
            traced = self._trace(stand_in)
            shown = None if key is None else self._kept.shown_for(key, traced.trace, stand_in.layers)
            if shown is None:
                other = take()
                if other is not None:
                    self._traced[_size_of(longer)] = other
                shown = prove(traced.trace, self._trace(longer).trace, stand_in.layers)
        return ShortTrace(traced=traced, repetition=shown, more=stand_in.more)

    def _key_of(self, stand_in: ShallowModel) -> TraceKey | None:
        """Return the stand-in's own key if the recipe counts its last layers, whose number the trace does not show."""
        if not stand_in.last:
            return trace_key(self._recipe, self._hf_config, self._machine)
        shallow_config = with_num_layers(self._hf_config, stand_in.num_layers)
        return trace_key(stand_in.recipe(self._recipe), shallow_config, ("stand-in", self._machine))

    def _traced_in_parallel(
        self, longer: ShallowModel, stand_in: ShallowModel
    ) -> AbstractContextManager[Take]:
        """Trace the longer stand-in in another process while this one traces the other, if neither trace exists."""
        if self._traced.keys() & {_size_of(longer), _size_of(stand_in)}:
            return contextlib.nullcontext(lambda: None)
        return forked_trace(lambda: self._trace(longer))

    def _trace(self, stand_in: ShallowModel) -> TracedRecipe:
        size = _size_of(stand_in)
        if size not in self._traced:
            config = with_num_layers(self._hf_config, stand_in.num_layers)
            self._traced[size] = trace_layers(
                stand_in.recipe(self._recipe), config, self._new_machine(), self._process_index
            )
        return self._traced[size]


def _size_of(stand_in: ShallowModel) -> tuple[object, ...]:
    return stand_in.num_layers, stand_in.last


def trace_layers(
    recipe: Recipe, hf_config: PretrainedConfig, machine: TracingMachine, process_index: int = 0
) -> TracedRecipe:
    """Trace all layers of an architecture, without any extension.

    Args:
        recipe: the recipe to train.
        hf_config: the architecture.
        machine: a fresh machine.
        process_index: the rank that is traced, if the recipe has several processes.

    Returns:
        The trace.

    Raises:
        UserError: as for :func:`trace_recipe`.
        ModelError: likewise.
    """
    if recipe.adapter.name != "none" and is_installed("peft"):
        # Otherwise the first trace of a process contains what PEFT allocates while it is imported.
        importlib.import_module("peft")
    runtime = virtual_runtime(machine, recipe.training, recipe.distributed, process_index)
    with (
        _said_if_long(recipe, hf_config),
        one_of_several(runtime.ranks.num_processes, process_index),
        machine,
    ):
        plan = plan_session(recipe, runtime, hf_config)
        rows, length = recipe.training.per_device_train_batch_size, row_length(recipe, plan.hf_config)
        machine.say(f"attention: {plan.attention.implementation} ({plan.attention.reason})")
        try:
            with machine.during("load"):
                session = build_session(recipe, runtime, plan, num_training_steps=NUM_STEPS)
            mark_weight_memory(session.techniques, machine)
            _take_steps(recipe, plan, session, machine)
            _evaluate(recipe, plan, session, machine)
            _generate(recipe, plan, session, machine)
        except (
            DataDependentOutputException,
            DynamicOutputShapeException,
            UnsupportedOperatorException,
        ) as error:
            raise _cannot_trace(recipe, hf_config, str(error.args[0])) from error
        except RuntimeError as error:
            if _NO_NUMPY not in str(error):
                raise
            raise _cannot_trace(recipe, hf_config, "Tensor.numpy()") from error
    return TracedRecipe(
        trace=machine.trace(recipe.model.name_or_path or ""),
        tokens_per_micro_batch=rows * length,
        batch=f"{rows} x {length} tokens",
        vocabulary_size=vocab_size(hf_config) or 0,
        copied_weight_bytes=copied_weight_bytes(session.techniques),
    )


@contextlib.contextmanager
def _said_if_long(recipe: Recipe, hf_config: PretrainedConfig) -> Iterator[None]:
    said = (recipe.model.name_or_path, hf_config.model_type, row_length(recipe, hf_config))
    began, over = time.process_time(), threading.Event()

    def watch() -> None:
        while (left := LONG_SECONDS - (time.process_time() - began)) > 0:
            if over.wait(left):
                return
        _say_that_it_takes_long(*said)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()


@functools.cache  # once for all traces of a model
def _say_that_it_takes_long(model: str | None, model_type: str, length: int) -> None:
    logger.warning(
        "Tracing %s (%s) takes long. Every operator of a step is traced, for most models in a minute or two; if a "
        "forward pass goes over its %d positions one by one, as in recurrent models without a kernel of their own, in "
        "many. Ctrl-C ends it; with rows a tenth as long (data.max_length=%d) such a model takes a tenth of the time, "
        "and its activations a tenth of the memory.",
        model,
        model_type,
        length,
        max(2, length // 10),  # the shortest length allowed
    )


def _cannot_trace(recipe: Recipe, hf_config: PretrainedConfig, operator: str) -> ModelError:
    return ModelError(
        f"{recipe.model.name_or_path} cannot be traced: the forward of its {hf_config.model_type} architecture calls "
        f"{operator}, whose result depends on values that a trace does not have. Rewrite that part with operators of "
        "fixed shape, or measure a small model of that architecture."
    )


def mark_weight_memory(techniques: Techniques, machine: TracingMachine) -> None:
    """Mark the memory in which techniques keep weights as such."""
    for weights in techniques.weight_memory():
        if weights.of is None:
            machine.mark_shared(weights.memory, "parameter")
        else:
            machine.mark(weights.memory, "parameter", of=weights.of)


def copied_weight_bytes(techniques: Techniques) -> int:
    """Return the bytes of memory that counts as weights but holds copies of weights stored elsewhere."""
    shared = (weights.memory for weights in techniques.weight_memory() if weights.of is None)
    return sum(memory.untyped_storage().nbytes() for memory in shared)


def _take_steps(recipe: Recipe, plan: Plan, session: Session, machine: TracingMachine) -> None:
    num_rows = recipe.training.per_device_train_batch_size
    retries = Retries(session, recipe)  # as a run has them: a retry takes a few bytes
    machine.step_is_over()
    for _ in range(NUM_STEPS):
        window = [
            _batch(recipe, plan, num_rows, machine)
            for _ in range(recipe.training.gradient_accumulation_steps)
        ]
        # In horizontal order the others only wait, in the host's memory.
        whole = session.techniques.takes_whole_window
        retries.train_step(window if whole else window[:NUM_MICRO_BATCHES])
        del window
        machine.step_is_over()


def _evaluate(recipe: Recipe, plan: Plan, session: Session, machine: TracingMachine) -> None:
    data, training = recipe.data, recipe.training
    if not data.has_held_out:
        return
    num_rows = training.per_device_eval_batch_size or training.per_device_train_batch_size
    session.techniques.flush()
    session.model.eval()
    with machine.during("evaluation"):
        evaluation_loss(session, [_batch(recipe, plan, num_rows, machine)])
    session.model.train()


def _generate(recipe: Recipe, plan: Plan, session: Session, machine: TracingMachine) -> None:
    """Trace the answer to the longest prompt."""
    if not recipe.training.generates:
        return
    most = row_length(recipe, plan.hf_config) + recipe.training.max_new_tokens
    session.techniques.flush()
    session.model.eval()
    with machine.during("evaluation"):
        trace_answer(session, min(most, max_positions(plan.hf_config) or most), machine)
    session.model.train()


def _batch(recipe: Recipe, plan: Plan, num_rows: int, machine: TracingMachine) -> Batch:
    batch = worst_batch(recipe, plan.hf_config, num_rows, attn_implementation=plan.attention.implementation)
    for tensor in (batch.input_ids_BT, batch.labels_BT, batch.position_ids_BT):
        if tensor is not None:
            machine.mark(tensor, "input")
    return batch
