"""Somebody's training script translated into a recipe."""
