"""Noise scale, and the trade between batch sizes, as text."""
