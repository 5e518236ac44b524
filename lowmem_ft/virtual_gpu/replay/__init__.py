"""A trace replayed on a GPU: its memory through the caching allocator, its time by the clock."""
