"""Why a DataLoader fails or hangs, and how to fix it."""
