"""Finding the decoder layers of a model, and changing living modules so that it can be taken back."""
