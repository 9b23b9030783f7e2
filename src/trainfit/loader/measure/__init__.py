"""Real runs of a DataLoader: what each batch takes, and what disturbed it."""
