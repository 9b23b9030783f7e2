"""What a script does while it runs: its DataLoader, precision, steps and options."""
