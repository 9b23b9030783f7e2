"""Which batch sizes fit, and which one is recommended."""
