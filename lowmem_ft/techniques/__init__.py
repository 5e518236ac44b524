"""Memory techniques: one per file, each with one verb that enables it and returns the handle that undoes it."""
