"""This process and the system that it runs on: memory held, limits, signals."""
