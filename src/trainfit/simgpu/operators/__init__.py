"""Operators on the simulated device: own behaviour, scratch memory, kernels they launch."""
