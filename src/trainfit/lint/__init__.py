"""Reads a training script, without running it, for habits that cost memory or speed."""
