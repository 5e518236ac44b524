"""A technique that nobody has heard of joins by one entry in build.py: it then trains, and is in the estimate."""

from __future__ import annotations

import pytest
import torch
from ground_truth.real_run import run_for_real
from torch import Tensor, nn

from lowmem_ft.estimator import estimate_memory
from lowmem_ft.estimator.traces.tracing import NUM_STEPS
from lowmem_ft.recipe import load_recipe
from lowmem_ft.techniques.modules.patching import wrap_method
from lowmem_ft.techniques.technique import Technique
from lowmem_ft.training import build

ALLOWED_ERROR = 0.005
"""As of runs without it: tests/estimator/test_against_real_steps.py."""


class HalvedActivations(Technique):
    """What backward needs waits as bfloat16. It has something to ask of a loop, too: how many micro-batches come."""

    num_micro_batches = 0

    def before_forward(self, input_ids_BT, num_label_tokens):
        self.num_micro_batches += 1
        return {}


def enable_halved_activations(model: nn.Module) -> HalvedActivations:
    def pack(tensor: Tensor) -> Tensor | tuple[Tensor, torch.dtype]:
        is_weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        if is_weight or tensor.dtype != torch.float32 or tensor.dim() < 2:
            return tensor
        return tensor.to(torch.bfloat16), tensor.dtype

    def unpack(packed) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed[0].to(packed[1])

    def halved(forward):
        def with_halves(*args, **kwargs):
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                return forward(*args, **kwargs)

        return with_halves

    return HalvedActivations(wrap_method(model, "forward", halved))


def test_a_technique_that_joins_a_run_is_estimated_as_it_is_measured(monkeypatch):
    recipe = load_recipe(
        "tiny",
        [
            "training.use_cpu=true",
            "checkpointing.mode=none",
            "data.eval_size=null",
            "training.eval_steps=null",
            "training.gradient_accumulation_steps=1",
        ],
    )
    without = max(run_for_real(recipe, num_steps=NUM_STEPS).allocated.values())
    shipped, on = build.techniques_in_forward, []

    def with_one_more(model, *args):
        yield from shipped(model, *args)
        on.append(enable_halved_activations(model))
        yield on[-1]

    monkeypatch.setattr(build, "techniques_in_forward", with_one_more)
    estimated = estimate_memory(recipe, "cpu").allocated_peak_bytes
    measured = max(run_for_real(recipe, num_steps=NUM_STEPS).allocated.values())
    assert estimated == pytest.approx(measured, rel=ALLOWED_ERROR)
    assert measured < 0.9 * without
    assert len(on) >= 2  # traced, and run
    assert all(technique.num_micro_batches == NUM_STEPS for technique in on)
