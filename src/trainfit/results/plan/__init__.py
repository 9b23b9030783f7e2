"""The result of ``trainfit plan``, and what it consists of."""
