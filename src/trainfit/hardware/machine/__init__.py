"""A machine, read through the seam: memory, storage, limits, surroundings, all facts."""
