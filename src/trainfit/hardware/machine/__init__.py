"""The machine, read through one seam: processor, driver, memory, storage, limits, surroundings."""
