"""What is kept of each shipped recipe's needs is what an estimate says."""

from __future__ import annotations

import pytest

from lowmem_ft.planning.estimator import estimate_memory
from lowmem_ft.planning.estimator.run_host_memory import build_bytes
from lowmem_ft.recipe import load_recipe, shipped_recipes
from lowmem_ft.recipe.shipped.needs import CPU, needs_of_shipped_recipes

FEW = {"tiny", "demo-8bit"}
"""Estimated in seconds."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in shipped_recipes()],
)
def test_a_recipe_still_needs_what_is_kept(name):
    """If it does not, and should: `python scripts/recipe_needs.py NAME`. Other versions of torch differ a little."""
    needs = needs_of_shipped_recipes()[name]
    estimate = estimate_memory(load_recipe(name), needs.gpu)
    assert estimate.fits
    assert not estimate.tight
    of_build = build_bytes() if needs.gpu == CPU else 0
    assert estimate.process_peak_bytes == pytest.approx(needs.process_peak_bytes + of_build, rel=0.01)
    assert estimate.host_peak_bytes == pytest.approx(needs.host_peak_bytes + of_build, rel=0.01)
    assert estimate.host_pinned_bytes == pytest.approx(needs.host_pinned_bytes, rel=0.01)
