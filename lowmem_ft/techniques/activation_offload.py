"""Former location of :mod:`lowmem_ft.techniques.offload.activation_offload`."""

from lowmem_ft.foundation.moved import moved

__getattr__ = moved(__name__, "lowmem_ft.techniques.offload.activation_offload")
