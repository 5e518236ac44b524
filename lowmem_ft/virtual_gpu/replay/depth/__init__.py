"""Traces of deep models from those of shallow ones: proof that layers repeat, and extrapolation."""
