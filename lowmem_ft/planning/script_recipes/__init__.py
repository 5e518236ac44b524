"""A user's training script translated into a recipe."""
