"""Weights that wait in host memory and visit the device."""
