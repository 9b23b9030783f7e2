"""A training step: its phases on the host and the GPU, and the row that it becomes."""
