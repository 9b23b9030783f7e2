"""Checks of the processor: cores, clocks, idle states, NUMA nodes, threads."""
