"""The planner: finds the settings with which a step of a recipe is fastest inside a budget, and explains them."""

from lowmem_ft.planner.automatic_checkpointing import plan_checkpointing
from lowmem_ft.planner.memory_plan import MemoryPlan
from lowmem_ft.planner.planning import plan
from lowmem_ft.planner.search.estimated_search import PlanProgress

__all__ = ["MemoryPlan", "PlanProgress", "plan", "plan_checkpointing"]
