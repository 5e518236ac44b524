"""Training of a recipe: one step for real runs and traces, a loop around it, checkpoints that resume bit for bit."""
