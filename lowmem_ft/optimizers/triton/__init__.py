"""The compact update as one Triton kernel, and whether it can be used."""
