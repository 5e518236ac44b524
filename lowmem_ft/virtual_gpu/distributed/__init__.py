"""A trace of one rank among several: its collectives and DDP."""
