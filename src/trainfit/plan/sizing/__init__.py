"""The planned job: which batch sizes fit, and which one is recommended."""
