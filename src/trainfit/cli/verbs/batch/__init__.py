"""``trainfit batch``: the verb, and how its inputs are read."""
