"""A machine, its GPUs, and what was measured of them."""
