"""A job on other GPUs: does it fit, how fast, at what price."""
