"""The pre-flight estimator: the memory and time that a recipe needs, before a GPU is rented."""

from lowmem_ft.planning.estimator.estimate import CannotRun, estimate_memory, estimate_on_gpus
from lowmem_ft.planning.estimator.gpu_counts import SeveralGpus, estimate_on_several
from lowmem_ft.planning.estimator.method_estimates import MethodEstimate, estimate_methods

__all__ = [
    "CannotRun",
    "MethodEstimate",
    "SeveralGpus",
    "estimate_memory",
    "estimate_methods",
    "estimate_on_gpus",
    "estimate_on_several",
]
