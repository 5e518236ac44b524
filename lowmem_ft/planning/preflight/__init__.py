"""Steps before a run: a plan, and an estimate that is compared with the available memory before any weight is read.

The command line and ``lowmem_ft.train`` call this package. :mod:`lowmem_ft.training` imports nothing from the layers
above it; it receives the estimator as an argument.
"""
