"""Calls at a fixed rate: what is called, when each call is due, and how the wait is spent."""
