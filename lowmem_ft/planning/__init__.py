"""Answers before a run: its needs by estimates and rehearsals, plans for a budget, other people's scripts."""
