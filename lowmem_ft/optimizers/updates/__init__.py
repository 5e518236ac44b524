"""The update rules: one file per optimizer."""
