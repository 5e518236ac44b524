"""Data as files: their paths and formats, how they are read and cached, and datasets of the hub."""
