"""The choice of a method's fastest settings on a GPU."""
