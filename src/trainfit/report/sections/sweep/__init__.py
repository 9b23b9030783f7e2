"""What a sweep says: its cells as a table, what is best of them, and their Pareto front."""
