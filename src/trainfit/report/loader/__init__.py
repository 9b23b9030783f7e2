"""What was measured of a DataLoader, as text."""
