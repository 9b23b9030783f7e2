"""Where a tensor comes from, and what that says of a line that uses it."""
