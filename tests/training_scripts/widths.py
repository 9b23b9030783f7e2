"""A sibling module of the scripts."""


def hidden_width(width):
    return width
