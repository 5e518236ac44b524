"""Recipes: one typed value that decides a run, loaded from YAML and ``key=value`` settings."""

from lowmem_ft.recipe.loading import load_recipe
from lowmem_ft.recipe.reading.describing import recipe_to_yaml
from lowmem_ft.recipe.reading.recipe_files import shipped_recipes
from lowmem_ft.recipe.rules.conflicts import check_recipe
from lowmem_ft.recipe.training_config import TrainingConfig
from lowmem_ft.recipe.tree import Recipe

__all__ = ["Recipe", "TrainingConfig", "check_recipe", "load_recipe", "recipe_to_yaml", "shipped_recipes"]
