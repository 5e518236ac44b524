"""Plans at full size against random combinations, which ``scripts/bench plans`` has sampled."""

from __future__ import annotations

import pytest
from bench import plans as bench_plans

from lowmem_ft.foundation.budget import Budget
from lowmem_ft.foundation.memory.uncertainty import with_headroom
from lowmem_ft.foundation.units import GIB
from lowmem_ft.planning.planner import bounds, plan
from lowmem_ft.planning.planner.plan_target import Target
from lowmem_ft.recipe.space.search_space import with_settings


def test_bounds_hold_at_full_size_and_could_not_be_a_seventh_higher():
    """Held against some hundred estimates of an 8B: what a bound rules out is called proven."""
    header, rows = bench_plans.read(bench_plans.DATA / "llama-3.1-8b.jsonl")
    recipe, card = bench_plans.plain_recipe(header["model"]), "h100-80gb"
    shape, gpu = Target.of(recipe, card).shape, bench_plans.gpus_of(header)[card]
    shares: dict[str, list[float]] = {"device": [], "host": [], "seconds": []}
    for row in rows:
        changed, found = with_settings(recipe, row["settings"]), row["on"][card]
        parts = bounds.parts_of(changed, shape)
        device, host = bounds.device_bytes(parts, gpu), bounds.host_bytes(parts)
        shares["device"].append(with_headroom(device) / found["device_bytes"])
        shares["host"].append(with_headroom(host) / found["host_bytes"])
        shares["seconds"].append(bounds.seconds(changed, parts, shape, gpu) / found["step_seconds"])
    highest = {of: max(values) for of, values in shares.items()}
    assert all(share <= 1 for share in highest.values()), highest
    assert min(highest["device"], highest["host"]) > 0.95, highest
    assert 0.85 < highest["seconds"] < 0.9, "kernels that are no products take a tenth of any step"


@pytest.mark.parametrize("part", ["layers", "outer", "state", "gradients", "sums", "saved", "inputs"])
def test_a_bound_of_one_part_that_is_a_seventh_too_high_is_seen(part):
    """Of an 8B on one GPU; ``test_bounds.py`` and ``test_several_cards.py`` have the other parts."""
    header, rows = bench_plans.read(bench_plans.DATA / "llama-3.1-8b.jsonl")
    recipe, card = bench_plans.plain_recipe(header["model"]), "h100-80gb"
    shape, gpu = Target.of(recipe, card).shape, bench_plans.gpus_of(header)[card]
    shares = []
    for row in rows:
        parts = bounds.parts_of(with_settings(recipe, row["settings"]), shape)
        too_high = {**parts, part: parts[part].scaled(1.15)}
        device, host = bounds.device_bytes(too_high, gpu), bounds.host_bytes(too_high)
        shares.append(with_headroom(device) / row["on"][card]["device_bytes"])
        shares.append(with_headroom(host) / row["on"][card]["host_bytes"])
    assert max(shares) > 1


def test_the_page_has_the_plans_that_are_kept():
    page = bench_plans.PAGE.read_text(encoding="utf-8")
    assert bench_plans.with_plans(page) == page


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, card, device_gib",
    [
        *(("llama-3.1-8b", "h100-80gb", gib) for gib in (24, 48, 65, 79)),
        ("llama-3.1-8b", "rtx-4090", 23.5),
        ("llama-3.2-1b", "rtx-4060", 7.6),
    ],
)
def test_a_plan_is_as_good_as_the_best_at_random(model, card, device_gib):
    """Which is estimated as the clock is now."""
    _, rows = bench_plans.read(bench_plans.DATA / f"{model}.jsonl")
    fitting = [
        row
        for row in rows
        if row["on"][card]["device_bytes"] <= device_gib * GIB and row["on"][card]["host_bytes"] <= 64 * GIB
    ]
    best = min(fitting, key=lambda row: row["on"][card]["step_seconds"])
    recipe, budget = bench_plans.plain_recipe(model), Budget(device=f"{device_gib}GiB", host="64GiB")
    result = plan(recipe, budget, card)
    assert result.fits
    assert result.estimate.step is not None
    target = Target.of(bench_plans.with_budget(recipe, budget), card)
    other, _ = target.estimate(with_settings(recipe, best["settings"]))
    assert other.step is not None
    assert result.estimate.step.seconds <= 1.02 * other.step.seconds
