"""The planner: a recipe and a budget in, the settings out with which a step is fastest inside it, and why."""

from lowmem_ft.planner.automatic_checkpointing import plan_checkpointing
from lowmem_ft.planner.memory_plan import MemoryPlan
from lowmem_ft.planner.planning import PlanProgress, plan

__all__ = ["MemoryPlan", "PlanProgress", "plan", "plan_checkpointing"]
