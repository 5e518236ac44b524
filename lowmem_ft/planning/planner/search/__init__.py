"""The search of a plan: what is estimated next, and when nothing else can be better."""
