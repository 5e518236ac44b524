"""The clock: how long a recorded log of work takes on a GPU."""
