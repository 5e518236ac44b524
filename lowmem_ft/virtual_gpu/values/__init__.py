"""What a trace knows of values, and what a program is told that asks for one nobody knows."""
