"""Patches of other libraries beyond their documented interfaces, and the versions that were tested."""
