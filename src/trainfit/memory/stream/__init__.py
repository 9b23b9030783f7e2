"""Streams of allocations: replayed, at every batch size, against a capacity."""
