"""Why a protection is not available."""


class UnavailableError(Exception):
    """This protection does not work here; the message says why, in a few words."""
