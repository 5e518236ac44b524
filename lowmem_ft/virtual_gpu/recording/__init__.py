"""Recording of a program: its allocations, its work, and the purpose of each byte."""
