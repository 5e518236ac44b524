"""The compact update as one Triton kernel, and the check whether it can be used."""
