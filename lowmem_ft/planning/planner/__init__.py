"""The planner: finds the settings with which a step of a recipe is fastest inside a budget, and explains them."""

from lowmem_ft.planning.planner.automatic_checkpointing import plan_checkpointing
from lowmem_ft.planning.planner.memory_plan import MemoryPlan
from lowmem_ft.planning.planner.planning import plan
from lowmem_ft.planning.planner.search.estimated_search import PlanProgress

__all__ = ["MemoryPlan", "PlanProgress", "plan", "plan_checkpointing"]
