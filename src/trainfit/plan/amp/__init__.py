"""Mixed precision: candidates, hazards, choice."""
