"""What is measured on this machine for a plan: its GPU, its CPU, a real run."""
