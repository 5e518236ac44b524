"""What each rung of the ladder needs for Llama 3.1 8B at 2048 tokens, beside the design's own arithmetic."""

import pytest
from ladder_rungs import RUNGS, settings_of

from lowmem_ft.estimator import estimate_memory
from lowmem_ft.recipe import load_recipe

GB = 10**9
DESIGNED = {
    "+ split24 master, 8-bit state": 58.8 * GB,
    "+ step in backward": 43.7 * GB,
    "+ state on the host": 18.9 * GB,
    "+ weights streamed": 2.9 * GB,
    "+ MLP and head in tiles": 1.6 * GB,
}


@pytest.mark.parametrize(
    "rung", [rung for rung in RUNGS if rung.name in DESIGNED], ids=lambda rung: rung.name
)
def test_llama_8b_needs_what_the_design_says(rung):
    recipe = load_recipe(
        None,
        [
            *("model=llama-3.1-8b", "data=any", "data.max_length=2048", "training.max_grad_norm=null"),
            *settings_of(rung),
        ],
    )
    estimate = estimate_memory(recipe, "h200")
    assert estimate.allocated_peak_bytes == pytest.approx(DESIGNED[rung.name], rel=0.1)
