"""A training loop over the real DataLoader, with a GPU step of given length."""
