"""Settings that a recipe may become: the search space, and the changes with which it needs less memory."""
