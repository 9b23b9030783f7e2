"""A recorded run in figures: its steady steps, GPU time, memory, cores; for rules."""
