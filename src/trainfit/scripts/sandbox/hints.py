"""Hints for scripts that fail because of the sandbox."""

from __future__ import annotations

import errno

from trainfit.scripts.sandbox.state import current

_QUESTION = (
    "; it reads from standard input, which trainfit does not provide: pass "
    "the answer as an argument or environment variable"
)
_FULL = (
    "; the temporary layer for the script's writes is full: free space on "
    "the disk of TMPDIR, let the script save less, or give --allow-writes"
)
_REFUSED = (
    "; non-Python code wrote to a protected file, and no overlay can be mounted "
    "here: run where user namespaces are allowed, or give --allow-writes"
)


def hint(error: BaseException) -> str:
    """To be put behind the error's message; empty where the sandbox has no part in it."""
    state, text = current(), str(error)
    if isinstance(error, EOFError) and "reading a line" in text:
        return _QUESTION
    if state is None or state.kind == "none":
        return ""
    number = getattr(error, "errno", None)
    if number == errno.ENOSPC or "No space left on device" in text:
        return _FULL
    refused = number == errno.EACCES or "ermission denied" in text
    return _REFUSED if refused and state.kind == "redirection" else ""
