"""Checks of a recipe against a disk and a device, before torch is imported."""
