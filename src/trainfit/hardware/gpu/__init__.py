"""GPUs by name, and what their figures are."""
