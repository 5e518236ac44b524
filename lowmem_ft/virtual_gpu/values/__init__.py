"""Values that a trace knows, and answers to a program that asks for an unknown one."""
