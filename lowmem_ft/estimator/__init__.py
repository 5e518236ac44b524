"""The pre-flight estimator: what a recipe needs, before a GPU is rented."""

from lowmem_ft.estimator.estimate import CannotRun, estimate_memory, estimate_on_gpus
from lowmem_ft.estimator.methods import MethodEstimate, estimate_methods

__all__ = ["CannotRun", "MethodEstimate", "estimate_memory", "estimate_methods", "estimate_on_gpus"]
