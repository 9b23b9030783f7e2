"""Plans: which runs there are to make, child processes, prices of remedies, the decision."""
