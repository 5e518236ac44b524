"""``hf.attach``: a recipe's techniques inside somebody else's trainer."""
