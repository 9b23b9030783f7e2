"""What was simulated, step by step, as text."""
