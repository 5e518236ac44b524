"""The folder of a run: its files, its lock, and what an earlier run has left there."""
