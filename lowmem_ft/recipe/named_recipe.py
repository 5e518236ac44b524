"""Arguments of the functions that Python programs call first: a recipe and a budget, or what names one."""

from __future__ import annotations

import os

from lowmem_ft.foundation.budget import Budget
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.recipe.loading import load_recipe
from lowmem_ft.recipe.tree import Recipe

RecipeLike = Recipe | str | os.PathLike[str]
"""A recipe, or what :func:`lowmem_ft.load_recipe` takes: the name of a shipped one, or the path of a file."""


def as_recipe(recipe: RecipeLike) -> Recipe:
    """Return the recipe that an argument is or names.

    Raises:
        RecipeError: if a recipe of that name has a problem.
        UserError: if it is neither.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str | os.PathLike):
        return load_recipe(recipe)
    raise UserError(
        f"A recipe is the result of load_recipe('tiny'), or a name or path of one, got {recipe!r}. Pass one of these."
    )


def as_budget(budget: Budget | str | None) -> Budget | None:
    """Return the budget that an argument is; a size such as ``24GiB`` is that of the device.

    Raises:
        UserError: if it is neither.
    """
    if budget is None or isinstance(budget, Budget):
        return budget
    if isinstance(budget, str):
        return Budget(device=budget)
    raise UserError(
        f"A budget is Budget(device='24GiB', host='64GiB'), or the device's part as text, got {budget!r}. Pass one of "
        "these."
    )
