"""Changes of the training step."""
