"""What may be wrong with a run: each rule, by what it is about."""
