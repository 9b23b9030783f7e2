"""What may be wrong with a run: a rule a module."""
