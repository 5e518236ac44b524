"""Replay of a trace on a GPU: its memory through the caching allocator, its time by the clock."""
