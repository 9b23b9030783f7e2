"""Looks at the training from another thread: its stack, its variables, whether it goes on."""
