"""Rehearsal of a whole run before it is paid for: ``train()``'s own loop over the real data, on a virtual GPU."""

from lowmem_ft.planning.rehearsal.fix_search import Fix, FixSearch
from lowmem_ft.planning.rehearsal.rehearse import rehearse
from lowmem_ft.planning.rehearsal.result import Rehearsal

__all__ = ["Fix", "FixSearch", "Rehearsal", "rehearse"]
