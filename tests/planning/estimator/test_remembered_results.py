"""A recipe's trace is the same, event by event, whether torch is asked about each operator or only about new ones."""

from __future__ import annotations

import dataclasses

import pytest
from ladder_rungs import RUNGS, settings_of
from sweeps import few_quick

from lowmem_ft.planning.estimator.traces.tracing import trace_recipe
from lowmem_ft.recipe import load_recipe
from lowmem_ft.virtual_gpu.calls.fake_results import FakeResults
from lowmem_ft.virtual_gpu.gpu import VirtualGPU

SHORT = [
    "data.max_length=64",
    "data.eval_size=null",
    "training.eval_steps=null",
    "training.gradient_accumulation_steps=1",
]
RECIPES = {
    **{rung.name: list(settings_of(rung)) for rung in (RUNGS[3], RUNGS[7])},
    "QLoRA": ["model.dtype=bfloat16", "model.quantization=nf4", "adapter.name=lora", "adapter.r=4"],
    "float16": ["training.mixed_precision=fp16"],
    "paged 8-bit AdamW": ["optimizer.name=paged_adamw_8bit"],
    "activations on the host": ["offload.activations=all", "checkpointing.mode=none"],
}
QUICK = (RUNGS[7].name, "QLoRA", "activations on the host")
"""Copies, packed weights and adapters, hooks of autograd: what remembered results know of an operator is asked most."""


def numbered(work):
    """The log with its events numbered from 0: a process counts them on from one trace to the next."""
    number = {}
    return [
        dataclasses.replace(
            entry, event=number.setdefault(entry.event, len(number)) if entry.event >= 0 else -1
        )
        for entry in work
    ]


@pytest.mark.parametrize("name", few_quick(RECIPES, QUICK))
def test_a_trace_is_that_of_torchs_own_fake_mode(name, monkeypatch):
    recipe = load_recipe("tiny", [*SHORT, *RECIPES[name]])

    def trace():
        return trace_recipe(recipe, lambda: VirtualGPU("a100-80gb"), extend=False).trace

    remembered = trace()
    monkeypatch.setattr(FakeResults, "call", lambda self, func, args, kwargs: (func(*args, **kwargs), None))
    asked = trace()
    assert remembered.timeline.events == asked.timeline.events
    assert remembered.timeline.allocations == asked.timeline.allocations
    assert numbered(remembered.work) == numbered(asked.work)
    assert (remembered.choices, remembered.assumed_largest) == (asked.choices, asked.assumed_largest)
