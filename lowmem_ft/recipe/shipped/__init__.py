"""The shipped recipes: what each needs, and which one fits a model or a GPU."""
