"""Former location of :mod:`lowmem_ft.techniques.offload.optimizer_offload`."""

from lowmem_ft.foundation.moved import moved

__getattr__ = moved(__name__, "lowmem_ft.techniques.offload.optimizer_offload")
