"""The DataLoader of a command: measured, tuned, and its part of a plan."""
