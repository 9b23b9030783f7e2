"""The DataLoader as a queueing network, the machine that it has, and what bounds it."""
