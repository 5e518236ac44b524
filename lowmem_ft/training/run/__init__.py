"""One run and its folder: where it starts, what it logs, how it is watched and stopped."""
