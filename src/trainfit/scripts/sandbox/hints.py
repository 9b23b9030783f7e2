"""What a user can do where a script fails because of its sandbox."""

from __future__ import annotations

import errno

from trainfit.scripts.sandbox.state import current

_QUESTION = (
    "; it asks a question on standard input, which a run of trainfit does not have: give the "
    "answer by an argument or a variable of the environment"
)
_FULL = (
    "; the scratch layer that takes what the script writes is full: free some of the disk with "
    "the temporary files (TMPDIR), let the script save less, or give --allow-writes"
)
_REFUSED = (
    "; code other than Python wrote to a file that is protected here, where no overlay can be "
    "mounted: run where user namespaces are allowed, or give --allow-writes"
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
