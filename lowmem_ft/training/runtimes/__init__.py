"""Surroundings of a run: the values, ranks and files of one process, of Accelerate and of DeepSpeed."""
