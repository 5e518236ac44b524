"""Finds work on memory that no event, wait or synchronisation puts in order."""
