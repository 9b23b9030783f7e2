"""The DataLoader: a model of its queues, and what it says of the settings."""
