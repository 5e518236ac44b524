"""The clock: seconds that a recorded log of work takes on a GPU."""
