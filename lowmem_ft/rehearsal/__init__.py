"""Rehearsal of a whole run before it is paid for: ``train()``'s own loop over the real data, on a virtual GPU."""

from lowmem_ft.foundation.moved import renamed
from lowmem_ft.rehearsal.fix_search import Fix, FixSearch
from lowmem_ft.rehearsal.rehearse import rehearse
from lowmem_ft.rehearsal.result import Rehearsal

__getattr__ = renamed(__name__, {"Mend": Fix, "Mending": FixSearch})

__all__ = ["Fix", "FixSearch", "Rehearsal", "rehearse"]
