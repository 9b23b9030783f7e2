"""The DataLoader as a queueing network, and the constants that a probe gives it."""
