"""From an example's columns to tokens, and which of them are learned."""
