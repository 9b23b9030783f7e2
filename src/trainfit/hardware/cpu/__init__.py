"""The processor: topology, clocks, idle states, kinds of core."""
