"""Explains a live training run: a recorder in it, a sampler next to it, and rules."""
