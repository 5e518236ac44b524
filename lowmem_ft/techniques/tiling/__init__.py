"""Parts of a layer that work through the tokens tile by tile."""
