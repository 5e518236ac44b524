"""The parts of a model, and patches of live modules that can be undone."""
