from __future__ import annotations

import dataclasses

import pytest

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.planning.estimator import estimate_memory, fitting_shipped_recipe
from lowmem_ft.planning.estimator.fitting_shipped_recipe import shipped_recipe_that_fits
from lowmem_ft.recipe import load_recipe


@pytest.fixture
def asked(monkeypatch):
    """What is estimated, and says whether it fits: by a recipe's name."""
    plain = estimate_memory(load_recipe("tiny"), "l4")
    fits: dict[str, bool] = {}
    names: list[tuple[str, str | None, str | None]] = []

    def estimated(recipe, gpu, *, budget, kept=None):
        names.append((recipe.name, recipe.model.name_or_path, budget.device))
        if recipe.name not in fits:
            raise UserError("its model is unknown")
        return dataclasses.replace(plain, fits=fits[recipe.name])

    monkeypatch.setattr(fitting_shipped_recipe, "estimate_memory", estimated)
    return fits, names


def test_the_first_that_fits_on_the_card_within_the_budget(asked):
    fits, names = asked
    fits |= {"8b-24gb": False, "8b-16gb": True}
    recipe = load_recipe("7b-bf16", ["budget=23GiB"])
    found = shipped_recipe_that_fits(recipe, "rtx-4090")
    assert found is not None
    assert found.settings == ("recipe=8b-16gb", "model=Qwen/Qwen2.5-7B", "budget.device=23GiB")
    assert names == [("8b-24gb", "Qwen/Qwen2.5-7B", "23GiB"), ("8b-16gb", "Qwen/Qwen2.5-7B", "23GiB")]
    assert found.to_json()["settings"] == [*found.settings]


class Excluding:
    """Bounds that exclude recipes by name."""

    def __init__(self, *names):
        self.names = names

    def cannot_fit(self, recipe):
        return recipe.name in self.names

    def should_fit(self, recipe):
        return False


def test_what_bounds_exclude_takes_no_estimate_and_no_turn(asked):
    fits, names = asked
    fits |= {"8b-8gb": True, "8b-16gb": False, "8b-24gb": True}
    outlook = Excluding("8b-24gb", "8b-16gb")
    found = shipped_recipe_that_fits(load_recipe("7b-bf16", ["budget=9GiB"]), "rtx-4090", outlook=outlook)
    assert found is not None
    assert found.settings[0] == "recipe=8b-8gb"
    assert not {"8b-24gb", "8b-16gb"} & {name for name, _, _ in names}


def test_none_is_told_that_does_not_fit_or_cannot_run(asked):
    fits, names = asked
    fits |= {"8b-24gb": False}
    assert shipped_recipe_that_fits(load_recipe("7b-bf16"), "rtx-4090") is None
    assert [name for name, _, _ in names] == ["8b-24gb", "8b-16gb"]
    assert shipped_recipe_that_fits(load_recipe("7b-bf16"), "cpu") is None
