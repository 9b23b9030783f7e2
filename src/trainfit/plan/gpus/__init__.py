"""Comparison of GPUs for a job: fit, speed, price."""
