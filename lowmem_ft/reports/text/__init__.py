"""Text on a terminal of any width."""
