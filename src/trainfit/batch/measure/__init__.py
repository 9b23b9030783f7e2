"""Measures the gradient noise scale of a training loop: hooks, norms, estimates, cost."""
