"""Traces of recipes: made, keyed, kept, and extended to all layers."""
