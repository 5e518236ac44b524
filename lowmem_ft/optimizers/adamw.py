"""Former location of :mod:`lowmem_ft.optimizers.updates.adamw`."""

from lowmem_ft.foundation.moved import moved

__getattr__ = moved(__name__, "lowmem_ft.optimizers.updates.adamw")
