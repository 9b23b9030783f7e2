"""The verbs, a module each, and what those about watched runs share."""
