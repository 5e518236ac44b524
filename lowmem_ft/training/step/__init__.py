"""One optimizer step and what it needs: machine, techniques, schedule, loss scale, random state."""
