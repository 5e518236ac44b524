"""Processes of one run: launch, rendezvous, what they tell each other, and how they fail together."""
