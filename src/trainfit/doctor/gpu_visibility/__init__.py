"""Why PyTorch sees no GPU: a decision table over the driver stack."""
