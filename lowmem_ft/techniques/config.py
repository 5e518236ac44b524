"""Former location of the techniques' configs; each is in its own room, and all are fields of the recipe."""

from lowmem_ft.foundation.moved import moved

__getattr__ = moved(__name__, "lowmem_ft.recipe.tree")
