"""Real runs of a DataLoader: the time of each batch, and what disturbed it."""
