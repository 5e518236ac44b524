"""Parts of a layer that work through the tokens piece by piece."""
