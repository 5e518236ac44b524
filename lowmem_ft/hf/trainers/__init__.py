"""``hf.attach``: a recipe's techniques inside a user's trainer."""
