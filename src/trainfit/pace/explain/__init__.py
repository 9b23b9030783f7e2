"""Why paced calls are slower, what fixes that, and the proof."""
