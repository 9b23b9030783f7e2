"""What a DataLoader costs: real runs, a model of it, and its constants from the runs."""
