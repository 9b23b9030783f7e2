"""Memory that GPU libraries use in addition to an operator's results."""
