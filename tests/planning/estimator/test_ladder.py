"""What each rung of the ladder needs for Llama 3.1 8B at 2048 tokens, beside the design's own arithmetic."""

import pytest
from ladder_rungs import LLAMA_8B, RUNGS, settings_of

from lowmem_ft.planning.estimator import estimate_memory
from lowmem_ft.recipe import load_recipe

GB = 10**9
DESIGNED = {
    "+ split24 master, 8-bit state": 58.8 * GB,
    "+ step in backward": 43.7 * GB,
    "+ state on the host": 18.9 * GB,
    "+ weights streamed": 2.9 * GB,
    "+ MLP and head in tiles": 1.6 * GB,
}

BYTES_ON_HOST = {"+ state on the host": 3.03, "+ weights streamed": 5.03, "+ MLP and head in tiles": 5.03}
"""Of a parameter: a byte of master and two of state, with their scales; weights; waiting gradients are two more."""
NUM_PARAMETERS = 8_030_261_248
PINNED_BATCH_BYTES = 2**16
"""At the most, of tokens that wait to be copied."""


@pytest.mark.parametrize(
    "rung",
    [
        # `make test` takes the one that frees most
        rung if rung.name == "+ weights streamed" else pytest.param(rung, marks=pytest.mark.slow)
        for rung in RUNGS
        if rung.name in DESIGNED
    ],
    ids=lambda rung: rung.name,
)
def test_llama_8b_needs_what_the_design_says(rung):
    recipe = load_recipe(None, [*LLAMA_8B, "training.max_grad_norm=null", *settings_of(rung)])
    estimate = estimate_memory(recipe, "h200")
    assert estimate.allocated_peak_bytes == pytest.approx(DESIGNED[rung.name], rel=0.1)
    on_host = BYTES_ON_HOST.get(rung.name, 0) * NUM_PARAMETERS
    assert estimate.host_pinned_bytes == pytest.approx(on_host, rel=0.02, abs=PINNED_BATCH_BYTES)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rung", [rung for rung in RUNGS if rung.name in BYTES_ON_HOST], ids=lambda rung: rung.name
)
def test_exact_clipping_makes_gradients_wait_on_the_host(rung):
    estimate = estimate_memory(load_recipe(None, [*LLAMA_8B, *settings_of(rung)]), "h200")
    assert estimate.allocated_peak_bytes == pytest.approx(DESIGNED[rung.name], rel=0.1)
    on_host = (BYTES_ON_HOST[rung.name] + 2) * NUM_PARAMETERS
    assert estimate.host_pinned_bytes == pytest.approx(on_host, rel=0.02)
    assert estimate.host_by_part_at_peak["gradient"] == pytest.approx(2 * NUM_PARAMETERS, rel=0.01)
