"""The list of techniques: their order, and what a build looks for only once."""

from __future__ import annotations

import pytest

from lowmem_ft.recipe import load_recipe
from lowmem_ft.techniques.modules import model_parts
from lowmem_ft.training.runtimes.accelerate_runtime import launched_runtime
from lowmem_ft.training.runtimes.build import build_session, plan_session

MANY = [
    "training.use_cpu=true",
    "tiling.mlp=2",
    "checkpointing.mode=full",
    "offload.activations=inputs",
    "accumulation.order=vertical",
    "loss.chunk_tokens=64",
    "optimizer.in_backward=true",
    "offload.optimizer=host",
]


@pytest.fixture
def searches(monkeypatch):
    """The models whose stacks of layers were looked for."""
    found, stacks_in = [], model_parts._stacks_in

    def counted(model):
        found.append(model)
        return stacks_in(model)

    monkeypatch.setattr(model_parts, "_stacks_in", counted)
    return found


IN_FORWARD = ["Technique", "Technique", "_ActivationOffload", "VerticalAccumulation", "ChunkedLoss"]
IN_STEP = ["_OptimizerOffload", "Float32Accumulation", "InBackward"]
STREAMED = "offload.parameters=stream"


@pytest.mark.parametrize(
    "settings, enabled",
    [
        ([*MANY, STREAMED], [*IN_STEP, *IN_FORWARD, "ParameterStreaming"]),
        (
            [*MANY, STREAMED, "adapter.name=lora"],
            [*IN_STEP, "Lora", "Technique", *IN_FORWARD, "ParameterStreaming"],
        ),
        (MANY, [*IN_STEP, "UpdateOverlap", *IN_FORWARD]),
    ],
    ids=["streamed", "adapter", "overlapping"],
)
def test_a_build_enables_techniques_in_order_and_looks_for_layers_once(settings, enabled, searches, tmp_path):
    recipe = load_recipe("tiny", settings)
    runtime = launched_runtime(recipe.training, tmp_path)
    session = build_session(recipe, runtime, plan_session(recipe, runtime), num_training_steps=1)
    assert [type(technique).__name__ for technique in session.techniques] == enabled
    assert searches == [session.unwrapped_model]
    session.techniques.remove()
