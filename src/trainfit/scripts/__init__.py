"""Runs a user's script: on the simulated GPU, for real, or up to its DataLoader."""
