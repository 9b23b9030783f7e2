"""The machine next to the calls: clocks, idle states, GPU, system settings."""
