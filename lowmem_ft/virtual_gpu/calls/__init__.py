"""Calls that a trace records, with their results, and the device that they are for."""
