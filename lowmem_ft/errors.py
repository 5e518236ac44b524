"""The former place of :mod:`lowmem_ft.foundation.errors`."""

from lowmem_ft.foundation.moved import moved

__getattr__ = moved(__name__, "lowmem_ft.foundation.errors")
