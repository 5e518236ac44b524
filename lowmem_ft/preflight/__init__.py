"""What stands before a run: a plan, and an estimate that is held against what there is, before a weight is read.

This is what the command line and ``lowmem_ft.train`` call. :mod:`lowmem_ft.training` imports nothing from above itself;
it is handed who estimates.
"""

from lowmem_ft.preflight.train import train

__all__ = ["train"]
