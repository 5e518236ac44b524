"""The estimate for a CPU beside every tensor of real steps, phase by phase; few runs in which any two choices meet."""

import dataclasses

import pytest
from ground_truth.covering import covering
from measuring.comparison import compare, estimated_peaks, table
from measuring.cpu_matrix import FACTORS, is_possible, name_of, overrides_of
from measuring.families import FAMILIES, write_families
from measuring.real_run import run_for_real
from sweeps import few_quick

from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.foundation.memory.analysis import peak_by_phase
from lowmem_ft.planning.estimator import estimate_memory
from lowmem_ft.planning.estimator.traces.tracing import trace_recipe
from lowmem_ft.recipe import load_recipe
from lowmem_ft.virtual_gpu.gpu import VirtualGPU

ALLOWED_ERROR = 0.005
RUNS, _ = covering(FACTORS, is_possible)
ON_A_CPU, ON_CUDA = ("mixtral",), ("gemma3",)
"""What `make test` tries: experts; windows and a soft cap. `make test-all` tries every family."""


@pytest.fixture
def recipe_of(tmp_path):
    """The recipe of a run; families lie in a folder of the test's own."""
    write_families(tmp_path)

    def load(levels, *overrides):
        model = f"model={tmp_path / levels['family']}"
        return load_recipe(None, [*overrides_of(levels), model, *overrides])

    return load


@pytest.mark.parametrize("family", few_quick(sorted(FAMILIES), ON_A_CPU))
def test_each_phase_takes_what_was_estimated(family, recipe_of):
    comparisons = []
    for levels in RUNS:
        if levels["family"] == family:
            recipe = recipe_of(levels)
            measured = dataclasses.asdict(run_for_real(recipe))
            estimated = estimated_peaks(estimate_memory(recipe, "cpu"))
            assert estimated["allocated"].keys() == measured["allocated"].keys()
            comparisons += compare(name_of(levels), measured, estimated)
    print(*table(comparisons), sep="\n")  # noqa: T201
    assert len(comparisons) >= 7 * 4
    wrong = [comparison for comparison in comparisons if abs(comparison.error) > ALLOWED_ERROR]
    assert wrong == []


ON_BOTH = {
    "optimizer": "lion",
    "precision": "fp32",
    "checkpointing": "recomputed",
    "loss": "chunked",
    "attention": "eager",
    "window": "three",
    "rows": "3x64",
    "clipping": "clipped",
    "evaluation": "same",
}


@pytest.mark.parametrize("family", few_quick(sorted(FAMILIES.keys() - {"gpt2"}), ON_CUDA))
def test_a_virtual_cuda_device_takes_what_a_cpu_does(family, recipe_of, monkeypatch):
    """Where both run the same kernels: eager attention, no autocast, no Triton, and none of CUDA's own workspaces.

    GPT-2 is left out for its dropout, which keeps a byte an element on CUDA and a whole number on a CPU.
    """
    recipe = recipe_of({**ON_BOTH, "family": family})
    measured = run_for_real(recipe).allocated
    gpu = VirtualGPU(dataclasses.replace(find_gpu("a100-80gb"), has_triton=False))
    monkeypatch.setattr(gpu.recorder._costs, "_rule", None)
    timeline = trace_recipe(recipe, lambda: gpu).trace.timeline
    for allocation in timeline.allocations:
        if allocation.category == "workspace":
            allocation.place = "host"
    estimated = peak_by_phase(timeline, list(timeline.live_bytes()))
    assert estimated == pytest.approx(measured, rel=0.01)


def test_any_two_choices_meet_in_some_run():
    assert {(levels["family"], levels["optimizer"]) for levels in RUNS} >= {
        (family, optimizer) for family in FAMILIES for optimizer in ("adamw", "lion_8bit")
    }
    assert {(levels["rows"], levels["loss"]) for levels in RUNS} >= {
        (rows, loss) for rows in ("1x96", "3x64", "2x72-packed") for loss in ("plain", "chunked")
    }
