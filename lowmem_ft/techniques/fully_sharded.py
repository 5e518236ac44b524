"""Former location of :mod:`lowmem_ft.techniques.distributed.fully_sharded`."""

from lowmem_ft.foundation.moved import moved

__getattr__ = moved(__name__, "lowmem_ft.techniques.distributed.fully_sharded")
