"""Rules over a whole recipe: which values go together, and what no device or folder allows."""
