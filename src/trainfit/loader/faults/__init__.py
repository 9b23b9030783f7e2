"""Faults of a DataLoader that its data set shows: before any run, and after one that failed."""
