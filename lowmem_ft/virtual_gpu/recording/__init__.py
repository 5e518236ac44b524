"""Recording a program: its allocations, its work, and what each byte is for."""
