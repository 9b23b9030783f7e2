"""A watched training run: its tables as they are recorded, and what is said of it."""
