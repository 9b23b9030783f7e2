"""The GPU kernels of an operator: what they compute, move and allocate."""
