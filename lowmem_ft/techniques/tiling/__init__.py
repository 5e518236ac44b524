"""Parts of a layer that process the tokens tile by tile."""
