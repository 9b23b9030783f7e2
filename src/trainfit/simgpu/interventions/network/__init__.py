"""Changes of the model."""
