"""Answers of the model that is being trained: how they are generated, kept and shown."""
