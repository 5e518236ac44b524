"""Bounds and expectations of single recipes, as searches that estimate little ask for them."""

from __future__ import annotations

import dataclasses

from lowmem_ft.foundation.budget import Budget
from lowmem_ft.planning.planner.outlook import outlook_for


def test_a_recipe_cannot_fit_below_its_bound_and_should_fit_where_there_is_plenty(make_recipe):
    recipe = make_recipe()
    for device, cannot, should in (("256MiB", True, False), ("16GiB", False, True)):
        outlook = outlook_for(dataclasses.replace(recipe, budget=Budget(device=device, host="32GiB")), "l4")
        assert outlook is not None
        assert (outlook.cannot_fit(recipe), outlook.should_fit(recipe)) == (cannot, should), device
    assert outlook_for(recipe, "cpu") is None


def test_a_budget_below_any_process_has_no_outlook_and_is_left_to_estimates(make_recipe):
    """`estimate` answers that nothing fits, with the changes that come nearest; a plan refuses such a budget."""
    for budget in (Budget(device="100MiB"), Budget(device="16GiB", host="1GiB")):
        recipe = dataclasses.replace(make_recipe(), budget=budget)
        assert outlook_for(recipe, "t4") is None, budget
    recipe = dataclasses.replace(make_recipe(), budget=Budget(host="1GiB"))
    assert outlook_for(recipe, "cpu") is None
