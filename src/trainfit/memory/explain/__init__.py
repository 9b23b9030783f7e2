"""Composition of the peak memory, and its growth."""
