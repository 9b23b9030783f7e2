"""A machine's diagnosis, and calls at a fixed rate, as text."""
