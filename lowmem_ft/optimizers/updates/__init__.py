"""The update rules: one file an optimizer."""
