"""Words that messages and reports have in common."""


def count(number: int, thing: str) -> str:
    """A number with its noun: "1 step", "2 steps"."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
