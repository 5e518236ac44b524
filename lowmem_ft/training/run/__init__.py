"""One run and its folder: start, progress, metrics, health and interruption."""
