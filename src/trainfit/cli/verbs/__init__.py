"""The verbs, a module each."""
