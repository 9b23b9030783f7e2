"""Tensors of the simulated device: classes, memory formats, errors, saved files."""
