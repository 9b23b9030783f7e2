"""GPUs and comparisons of them as text."""
