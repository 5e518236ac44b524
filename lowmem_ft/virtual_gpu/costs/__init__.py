"""Costs of kernels: operations, bytes, launches and workspaces, collectives included."""
