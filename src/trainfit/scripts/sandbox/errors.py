"""The error for an unavailable protection."""


class UnavailableError(Exception):
    """This protection does not work here; the message says why, in a few words."""
