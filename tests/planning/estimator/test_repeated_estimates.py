"""Many estimates in one process: the same each time, and nothing left behind."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import pytest

from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.planning.estimator import estimate_memory
from lowmem_ft.recipe import load_recipe
from lowmem_ft.virtual_gpu.recording.recorder import Recorder
from lowmem_ft.virtual_gpu.tracing_machine import TracingMachine


def estimated(*settings: str) -> MemoryEstimate:
    recipe = load_recipe("tiny", ["data.max_length=16", "training.gradient_accumulation_steps=1", *settings])
    return dataclasses.replace(estimate_memory(recipe, "rtx-4090"), trace_seconds=0.0)


@pytest.mark.parametrize("settings", [(), ("training.mixed_precision=bf16", "checkpointing.mode=none")])
def test_the_same_estimate_twice_is_equal_down_to_its_timeline(settings: tuple[str, ...]) -> None:
    assert estimated(*settings) == estimated(*settings)


def test_an_estimate_leaves_neither_model_nor_recorder_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    recorders: list[weakref.ref[Recorder]] = []
    enter = TracingMachine.__enter__

    def note(machine: TracingMachine) -> TracingMachine:
        recorders.append(weakref.ref(machine.recorder))
        return enter(machine)

    monkeypatch.setattr(TracingMachine, "__enter__", note)
    estimated()
    gc.collect()
    assert recorders
    assert not [recorder for recorder in recorders if recorder() is not None]
