"""A plan's bounds, held to what the estimator finds."""

from __future__ import annotations

from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.planning.estimator import estimate_memory
from lowmem_ft.planning.planner import bounds

GPU = "l4"


def assert_bounded(recipe, shape):
    """Hold a recipe's bounds to its estimate, and return that."""
    gpu, estimate = find_gpu(GPU), estimate_memory(recipe, GPU)
    assert estimate.step is not None
    parts = bounds.parts_of(recipe, shape)
    for name, bound, found in (
        ("device", bounds.device_bytes(parts, gpu), estimate.process_peak_bytes),
        ("host", bounds.host_bytes(parts), estimate.host_peak_bytes),
        ("seconds", bounds.seconds(recipe, parts, shape, gpu), estimate.step.seconds),
    ):
        assert 0 < bound <= found, (name, bound, found, recipe)
    return estimate
