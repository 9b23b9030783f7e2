"""Chooses a DataLoader's settings: predict many, measure few, give the reasons."""
