"""The pre-flight estimator: what a recipe needs, before a GPU is rented."""

from lowmem_ft.estimator.estimate import CannotRun, estimate_memory, estimate_on_gpus

__all__ = ["CannotRun", "estimate_memory", "estimate_on_gpus"]
