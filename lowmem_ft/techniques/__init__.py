"""Memory techniques: one a file, each with one verb that switches it on and returns the way back."""
